"""One budget over many runs: refused when it is spent, right after crashes and with several processes."""

import json
import multiprocessing
from pathlib import Path

import pytest

from dpformer.accounting import Ledger
from dpformer.accounting.events import Gaussian
from dpformer.errors import DpformerError
from dpformer.runs import ledger_file
from tests.tiny_runs import invoke, printed, refused, write_catalog
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401

EVENT = Gaussian(noise_multiplier=2.0, label="counts")


def test_runs_are_counted_together_until_the_budget_is_spent(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    two, three = (Ledger([Gaussian(noise_multiplier=2.0, count=n)]).epsilon(1e-5) for n in (2, 3))
    ledger_file.create(path, (two + three) / 2, 1e-5)
    for run in "ab":
        ledger_file.reserve(path, tmp_path / run, [EVENT])
    assert ledger_file.read(path).spent == pytest.approx(two, rel=1e-6)
    before = path.read_bytes()
    with pytest.raises(DpformerError, match="nothing was released"):
        ledger_file.reserve(path, tmp_path / "c", [EVENT])
    assert path.read_bytes() == before
    with pytest.raises(DpformerError, match="set once"):
        ledger_file.create(path, 100, 1e-5)


def spend(path: Path, number: int) -> bool:
    try:
        ledger_file.reserve(path, f"run-{number}", [EVENT])
    except DpformerError:
        return False
    return True


def test_two_processes_never_spend_the_same_budget(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    ledger_file.create(path, 1.01 * Ledger([Gaussian(noise_multiplier=2.0, count=3)]).epsilon(1e-5), 1e-5)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        done = pool.starmap(spend, [(path, number) for number in range(8)])
    assert sum(done) == 3 == len(ledger_file.read(path).runs)


def test_a_run_that_may_fail_more_often_than_the_ledger_allows_is_one_sentence(tmp_path: Path) -> None:
    """A list of items released at δ = 10⁻⁴ has no ε at all at 10⁻⁶: it was a traceback."""
    ledger_file.create(tmp_path / "budget.json", 10, 1e-6)
    with pytest.raises(DpformerError, match="it would be ∞: its δ is not below the ledger's, lower --delta"):
        ledger_file.reserve(tmp_path / "budget.json", "run", [Gaussian(9.0, label="items", delta=1e-4)])


WRONG_RUNS = ('[{"events": []}]', '[{"run": 1, "started": "now", "events": []}]', "[[]]", '{"a": 1}')
HELD = '{{"format": 1, "epsilon": 1, "delta": 0.1, "runs": {}}}'


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", '{"format": 1, "epsilon": 1, "delta": 2, "runs": []}', *map(HELD.format, WRONG_RUNS)],
)
def test_what_cannot_be_believed_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    path.write_text(content)
    with pytest.raises(DpformerError, match="not a ledger"):
        ledger_file.reserve(path, "run", [EVENT])
    assert path.read_text() == content


def test_training_with_a_ledger(tmp_path: Path) -> None:
    log, path = write_log(tmp_path / "log.csv"), tmp_path / "budget.json"
    catalog = ("--catalog", write_catalog(tmp_path / "items.csv"))
    assert "make one with dpformer ledger" in refused("train", log, "--ledger", path, *catalog, "--out", tmp_path / "a")
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
    assert statement["budget"] == {"epsilon": 5.0, "delta": 0.001, "spent": pytest.approx(spent), "runs": 1}
    assert "of 5 is spent at δ = 0.001 by 1 run, and the rest" in statement["nist_sp_800_226"]["remaining_budget"]
    assert not (run / "checkpoint" / "budget.json").exists()
    assert "budget of many runs" in json.loads(printed("verify", run, "--json"))["not_checked"]
    for wrong in ({"spent": spent / 2}, {"spent": 5.5}, {"runs": 0}, {"more": 1}):
        path.write_text(json.dumps({**statement, "budget": {**statement["budget"], **wrong}}))
        assert invoke("verify", run).exit_code == 1, wrong
    path.write_text(json.dumps(statement))


def test_a_run_that_fails_stays_in_the_ledger_and_goes_on_at_no_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it drew may have been seen. Only where its folder could not be made has it drawn nothing."""
    log, path = write_log(tmp_path / "log.csv"), tmp_path / "budget.json"
    ledger_file.create(path, 5, 0.001)
    catalog = write_catalog(tmp_path / "items.csv")
    arguments = ("train", log, "--epsilon", 4, "--delta", 0.001, "--ledger", path, "--catalog", catalog, "--out")
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refused(*arguments, tmp_path / "file" / "run")
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
    assert "saw the same data" in second.stderr and "1 / (10" in second.stderr
    third = invoke("train", log, *catalog, "--out", tmp_path / "elsewhere" / "c", "--delta", 0.001)
    assert "note: an earlier run of this process saw the same data" in third.stderr and "δ" not in third.stderr
