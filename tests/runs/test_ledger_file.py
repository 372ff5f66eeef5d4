"""One budget over many runs: refused when it is spent, right after crashes and with several processes."""

import json
import multiprocessing
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpformer.accounting import Ledger, calibrate
from dpformer.accounting.events import Gaussian
from dpformer.errors import DpformerError
from dpformer.runs import ledger_chain, ledger_file
from tests.tiny_runs import invoke, printed, refused, write_catalog
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401

EVENT = Gaussian(noise_multiplier=2.0, label="counts")
EVENT_COST = Ledger([EVENT]).epsilon(1e-5)


def test_runs_are_counted_together_until_the_budget_is_spent(tmp_path: Path) -> None:
    path = tmp_path / "budget.db"
    two, three = (Ledger([Gaussian(noise_multiplier=2.0, count=n)]).epsilon(1e-5) for n in (2, 3))
    ledger_file.create(path, (two + three) / 2, 1e-5)
    for run in "ab":
        ledger_file.reserve(path, tmp_path / run, [EVENT])
    assert ledger_file.read(path).spent == pytest.approx(two, rel=1e-6)
    before = path.read_bytes()
    with pytest.raises(DpformerError, match="nothing was released"):
        ledger_file.reserve(path, tmp_path / "c", [EVENT])
    assert path.read_bytes() == before
    with pytest.raises(DpformerError, match="cannot be changed"):
        ledger_file.create(path, 100, 1e-5)


def spend(path: Path, number: int) -> bool:
    try:
        ledger_file.reserve(path, f"run-{number}", [EVENT])
    except DpformerError:
        return False
    return True


def test_two_processes_never_spend_the_same_budget(tmp_path: Path) -> None:
    path = tmp_path / "budget.db"
    ledger_file.create(path, 1.01 * Ledger([Gaussian(noise_multiplier=2.0, count=3)]).epsilon(1e-5), 1e-5)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        done = pool.starmap(spend, [(path, number) for number in range(8)])
    assert sum(done) == 3 == len(ledger_file.read(path).runs)


def test_a_run_that_may_fail_more_often_than_the_ledger_allows_is_one_sentence(tmp_path: Path) -> None:
    """A list of items released at δ = 10⁻⁴ has no ε at all at 10⁻⁶: it was a traceback."""
    ledger_file.create(tmp_path / "budget.db", 10, 1e-6)
    with pytest.raises(DpformerError, match="it would be ∞: its δ is not below the ledger's; lower --delta"):
        ledger_file.reserve(tmp_path / "budget.db", "run", [Gaussian(9.0, label="items", delta=1e-4)])


WRONG_RUNS = (
    {"events": []},
    {"run": 1, "started": "now", "events": []},
    {"run": "a", "started": "now", "events": [{}]},
    {"run": "a", "started": "now", "events": [], "mean_runs": 1},
)
HELD = {"format": 1, "epsilon": 5.0, "delta": 1e-5}


@pytest.mark.parametrize("run", WRONG_RUNS)
def test_an_entry_that_cannot_be_believed_is_refused(run: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "budget.db"
    ledger_file.create(path, 5, 1e-5)
    with ledger_chain.opened(path, write=True) as chain:
        chain.append("run", run)
    with pytest.raises(DpformerError, match="not a readable ledger"):
        ledger_file.reserve(path, "run", [EVENT])


@pytest.mark.parametrize("content", [b"", b"[1]", b"SQLite format 3\0", b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_none_is_refused_and_stays(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "budget.db"
    path.write_bytes(content)
    with pytest.raises(DpformerError, match="not a readable ledger"):
        ledger_file.reserve(path, "run", [EVENT])
    assert path.read_bytes() == content


def three_runs(path: Path) -> Path:
    ledger_file.create(path, 5, 1e-5)
    for run in "abc":
        ledger_file.reserve(path, path.parent / run, [EVENT])
    return path


EDIT = "UPDATE entries SET body = replace(body, '2.0', '9.0') WHERE number = 2"
FORGED = "UPDATE entries SET body = '{}', hash = 'a' WHERE number = 2"


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        (EDIT, "entry 2 does not match its hash"),
        (FORGED, "entry 2 does not match its hash"),
        ("DELETE FROM entries WHERE number = 2", "entry 2 is missing"),
        ("DELETE FROM entries WHERE number = 3", "its last entry is 2, but 3 was written"),
        ("DELETE FROM head", "entries were deleted"),
        ("UPDATE entries SET number = 7 WHERE number = 3", "entry 3 is missing"),
        ("CREATE VIEW more AS SELECT 1", "it has other tables"),
    ],
)
def test_an_edited_or_dropped_entry_shows(sql: str, says: str, tmp_path: Path) -> None:
    path = three_runs(tmp_path / "budget.db")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql)
    before = path.read_bytes()
    for use in (lambda: ledger_file.read(path), lambda: ledger_file.reserve(path, "d", [EVENT])):
        with pytest.raises(DpformerError, match=says):
            use()
    assert path.read_bytes() == before


def test_a_ledger_that_was_written_anew_shows_against_its_runs(tmp_path: Path) -> None:
    """A chain without keys can be forged from end to end; what statements say of it cannot."""
    path = tmp_path / "budget.db"
    ledger_file.create(path, 5, 1e-5)
    run = tmp_path / "a"
    run.mkdir()
    (run / "config.toml").write_text("")
    known = ledger_file.reserve(path, run, [EVENT]).facts()
    (run / "privacy.json").write_text(json.dumps({"budget": known, "events": [EVENT.to_dict()]}))
    assert "is unchanged" in printed("ledger", "check", path, run)
    path.unlink()
    ledger_file.create(path, 5, 1e-5)
    ledger_file.reserve(path, run, [EVENT])
    found = invoke("ledger", "check", path, run)
    assert found.exit_code == 1 and "rewritten" in found.stdout


def test_a_finished_run_is_counted_once_and_as_it_was(tmp_path: Path) -> None:
    """Its entry was withdrawn by a further one, which no hash contradicts: the check said that it was unchanged."""
    log, path, run = write_log(tmp_path / "log.csv"), tmp_path / "budget.db", tmp_path / "run"
    ledger_file.create(path, 8, 1e-2)
    printed("train", log, "--out", run, "--epsilon", 2, "--model", "counts", "--ledger", path, "--assume-items-public")
    shutil.copytree(run, other := tmp_path / "other")
    shutil.copytree(run, changed := tmp_path / "changed")
    facts = json.loads((run / "privacy.json").read_text())
    (other / "privacy.json").write_text(json.dumps({**facts, "hashes": {**facts["hashes"], "model": "0" * 64}}))
    events = [{**event, "noise_multiplier": 0.1} for event in facts["events"]]
    (changed / "privacy.json").write_text(json.dumps({**facts, "events": events}))
    found = [problem for _, problem in ledger_file.check_runs(path, [run, run, other, changed])]
    assert found[:2] == ["", ""]
    assert "another of these runs" in found[2] and "other events" in found[3]
    with ledger_chain.opened(path, write=True) as chain:
        chain.append(ledger_file.TAKEN_BACK, {"entry": chain.entries[-1].number})
    result = invoke("ledger", "check", path, run)
    assert result.exit_code == 1 and "was withdrawn, although the run is finished" in result.stdout


def test_a_process_that_dies_leaves_no_half_entry(tmp_path: Path) -> None:
    path = three_runs(tmp_path / "budget.db")
    process = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == 7 and len(ledger_file.read(path).runs) == 3
    assert len(ledger_file.reserve(path, "d", [EVENT]).runs) == 4, "its lock is gone with it"


def _die_while_writing(path: Path) -> None:
    with ledger_chain.opened(path, write=True) as chain:
        chain.append("run", {"run": "dead", "started": "now", "events": []})
        os._exit(7)


def test_a_ledger_of_an_older_version_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    runs = [
        {"run": str(tmp_path / r), "started": "2026-01-01T00:00:00+00:00", "events": [EVENT.to_dict()]} for r in "ab"
    ]
    runs[1]["mean_runs"] = 3.0
    path.write_text(json.dumps({**HELD, "runs": runs}))
    said = refused("ledger", path)
    assert said.endswith(f"dpformer ledger convert {path}")
    printed("ledger", "convert", path)
    budget = ledger_file.read(path)
    assert [run["run"] for run in budget.runs] == [run["run"] for run in runs] and budget.epsilon == 5
    assert budget.runs[1]["mean_runs"] == 3 and budget.spent > 0
    assert json.loads((tmp_path / "budget.json.json-before").read_text())["runs"] == runs
    assert "not a ledger of an older version" in refused("ledger", "convert", path)


@pytest.mark.parametrize("content", ["{}", '{"format": 2}', json.dumps({**HELD, "runs": [{"events": []}]})])
def test_what_is_no_old_ledger_is_not_converted(content: str, tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    path.write_text(content)
    assert "not a ledger of an older version" in refused("ledger", "convert", path)
    assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")] == ["budget.json"]
    assert path.read_text() == content


def test_it_says_what_each_run_cost_and_how_many_more_fit(tmp_path: Path) -> None:
    path = tmp_path / "budget.db"
    three, four = (Ledger([Gaussian(noise_multiplier=2.0, count=n)]).epsilon(1e-5) for n in (3, 4))
    ledger_file.create(path, (three + four) / 2, 1e-5)
    ledger_file.reserve(path, tmp_path / "a", [EVENT])
    facts = json.loads(printed("ledger", path, "--json"))
    assert facts["fits"] == {str(tmp_path / "a"): 2}
    assert facts["runs"][0]["epsilon_alone"] == pytest.approx(EVENT_COST, rel=1e-6)
    text = printed("ledger", path)
    assert "2 more runs like" in text and "on its own" in text and "hash chain intact" in text
    for run in "bc":
        ledger_file.reserve(path, run, [EVENT])
    with pytest.raises(DpformerError, match="nothing was released"):
        ledger_file.reserve(path, "d", [EVENT])


# Plans.


def test_shares_of_a_plan_compose_to_the_budget_and_beat_division(tmp_path: Path) -> None:
    path = tmp_path / "weekly.db"
    facts = json.loads(printed("ledger", "plan", path, "--runs", 52, "--epsilon", 8, "--users", 100_000, "--json"))
    share = facts["share"]
    event = Gaussian(share["noise_multiplier"], label="counts")
    delta = 1e-6
    assert 0.995 * 8 < Ledger([Gaussian(share["noise_multiplier"], count=52)]).epsilon(delta) <= 8
    assert share["epsilon"] > 5 * facts["divided"] and share["delta"] == pytest.approx(delta / 52)
    assert facts["members_found"]["one_run"] < facts["members_found"]["all_runs"]
    for week in range(52):
        ledger_file.reserve(path, f"week-{week}", [event])
    with pytest.raises(DpformerError, match=r"all 52 runs of the plan are taken|it would be"):
        ledger_file.reserve(path, "week-52", [Gaussian(1e4, label="counts")])
    assert len(ledger_file.read(path).runs) == 52


def test_a_run_that_takes_more_than_its_share_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weekly.db"
    budget = ledger_file.create(path, 8, 1e-6, plan=10)
    noise = {eps: calibrate(epsilon=eps, delta=1e-7, sample_rate=1.0, steps=1) for eps in (2.0, 3.0)}
    share = budget.share(lambda eps: [Gaussian(calibrate(epsilon=eps, delta=1e-7, sample_rate=1.0, steps=1))])
    assert 2.0 < share < 3.0
    before = path.read_bytes()
    with pytest.raises(DpformerError, match="exceeds its share: 10 of 10 runs are left"):
        ledger_file.reserve(path, "a", [Gaussian(noise[3.0])])
    assert path.read_bytes() == before
    after = ledger_file.reserve(path, "a", [Gaussian(noise[2.0])])
    again = after.share(lambda eps: [Gaussian(calibrate(epsilon=eps, delta=1e-7, sample_rate=1.0, steps=1))])
    assert after.left == 9 and again > share, "what one run leaves is the others'"


def test_a_plan_needs_a_budget_once(tmp_path: Path) -> None:
    path = tmp_path / "weekly.db"
    assert "needs --epsilon" in refused("ledger", "plan", path, "--runs", 4)
    assert "dividing ε instead would give" in printed("ledger", "plan", "--runs", 4, "--epsilon", 2, "--delta", 1e-6)
    printed("ledger", path, "--epsilon", 2, "--delta", 1e-6)
    assert "cannot be changed" in refused("ledger", "plan", path, "--runs", 4, "--epsilon", 3, "--delta", 1e-6)
    printed("ledger", "plan", path, "--runs", 4)
    assert "4 of 4 runs are left" in printed("ledger", path)


def test_training_takes_its_share_of_a_plan(tmp_path: Path) -> None:
    log, path = write_log(tmp_path / "log.csv"), tmp_path / "weekly.db"
    catalog = write_catalog(tmp_path / "items.csv")
    printed("ledger", "plan", path, "--runs", 3, "--epsilon", 6, "--delta", 0.001)
    arguments = ("train", log, "--ledger", path, "--catalog", catalog)
    assert "exceeds its share" in refused(*arguments, "--epsilon", 6, "--out", tmp_path / "greedy")
    epsilons = []
    for week in range(3):
        printed(*arguments, "--out", tmp_path / f"{week}")
        statement = json.loads((tmp_path / f"{week}" / "privacy.json").read_text())
        epsilons.append(statement["epsilon"])
        assert statement["delta"] == pytest.approx(0.001 / 3)
    assert 0.98 * 6 < ledger_file.read(path).spent <= 6 and min(epsilons) > 2
    assert "all 3 runs of the plan are taken" in refused(*arguments, "--out", tmp_path / "fourth")
    assert not (tmp_path / "fourth").exists()
    assert printed("ledger", "check", path, *(tmp_path / f"{week}" for week in range(3))).count("is unchanged") == 3
    printed("verify", tmp_path / "2")


def test_training_with_a_ledger(tmp_path: Path) -> None:
    log, path = write_log(tmp_path / "log.csv"), tmp_path / "budget.db"
    catalog = ("--catalog", write_catalog(tmp_path / "items.csv"))
    assert "create one with dpformer ledger" in refused(
        "train", log, "--ledger", path, *catalog, "--out", tmp_path / "a"
    )
    assert "ε 0 of 5" in printed("ledger", path, "--epsilon", 5, "--delta", 0.001)
    arguments = ("--epsilon", 4, "--delta", 0.001, "--ledger", path, *catalog)
    printed("train", log, *arguments, "--out", tmp_path / "a")
    facts = json.loads(printed("ledger", path, "--json"))
    assert 0 < facts["spent"] <= 4 and facts["runs"][0]["run"] == str(tmp_path / "a")
    states_its_budget(tmp_path / "a", facts["spent"])
    assert "nothing was released" in refused("train", log, *arguments, "--out", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    assert "cannot be counted" in refused("train", log, *arguments, "--seed", 1, "--out", tmp_path / "c")
    assert "both --epsilon and --delta" in refused("ledger", path, "--epsilon", 3)


def states_its_budget(run: Path, spent: float) -> None:
    """The statement knows what the ledger had; `verify` finds what cannot be, and says what it has not checked."""
    path = run / "privacy.json"
    statement = json.loads(path.read_text())
    known = {name: value for name, value in statement["budget"].items() if name != "hash"}
    assert known == {"epsilon": 5.0, "delta": 0.001, "spent": pytest.approx(spent), "runs": 1, "entry": known["entry"]}
    assert "of 5 at δ = 0.001 spent by 1 run" in statement["nist_sp_800_226"]["remaining_budget"]
    assert not (run / "checkpoint" / "budget.db").exists()
    assert "budget of many runs" in json.loads(printed("verify", run, "--json"))["not_checked"]
    for wrong in ({"spent": spent / 2}, {"spent": 5.5}, {"runs": 0}, {"more": 1}):
        path.write_text(json.dumps({**statement, "budget": {**statement["budget"], **wrong}}))
        assert invoke("verify", run).exit_code == 1, wrong
    path.write_text(json.dumps(statement))


def test_a_run_that_fails_stays_in_the_ledger_and_goes_on_at_no_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it drew may have been seen. Only where its folder could not be made has it drawn nothing."""
    log, path = write_log(tmp_path / "log.csv"), tmp_path / "budget.db"
    ledger_file.create(path, 5, 0.001)
    catalog = write_catalog(tmp_path / "items.csv")
    arguments = ("train", log, "--epsilon", 4, "--delta", 0.001, "--ledger", path, "--catalog", catalog, "--out")
    (tmp_path / "file").write_text("")
    assert "cannot be created" in refused(*arguments, tmp_path / "file" / "run")
    assert ledger_file.read(path).runs == ()

    def full(*_: object, **__: object) -> None:
        raise DpformerError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("dpformer.runs.session.save_release", full)
        failed = invoke(*arguments, tmp_path / "a")
    assert isinstance(failed.exception, DpformerError) and "counts this run as spent" in failed.stderr
    assert "--resume" in failed.stderr and len(ledger_file.read(path).runs) == 1
    printed("train", "--resume", tmp_path / "a")
    assert len(ledger_file.read(path).runs) == 1
    states_its_budget(tmp_path / "a", ledger_file.read(path).spent)


def test_without_a_ledger_a_second_run_and_a_large_delta_are_noted(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", seed=78)
    catalog = ("--catalog", write_catalog(tmp_path / "items.csv"))
    first = invoke("train", log, *catalog, "--out", tmp_path / "a", "--delta", 0.1)
    assert "is above 1 / 60 users" in first.stderr and "same data" not in first.stderr
    second = invoke("train", log, *catalog, "--out", tmp_path / "b", "--delta", 0.01)
    assert "used the same data" in second.stderr and "1 / (10" in second.stderr
    third = invoke("train", log, *catalog, "--out", tmp_path / "elsewhere" / "c", "--delta", 0.001)
    assert "note: an earlier run of this process used the same data" in third.stderr and "δ" not in third.stderr
