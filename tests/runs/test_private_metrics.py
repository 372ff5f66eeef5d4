"""`--private-metrics`: accuracy within the budget, from the config to statement, terminal, report and `verify`."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpformer.accounting import Gaussian, epsilon_of
from dpformer.errors import DpformerError
from dpformer.kinds.counts import counts_of
from dpformer.kinds.ranking import served_ranks
from dpformer.noise.randomness import SecureRandom, public_grid
from dpformer.queries.metrics import MetricRelease, user_values
from dpformer.runs import Config, finished, load_dataset, resume, train
from dpformer.runs.folder import RunFolder
from dpformer.runs.planning import make_plan
from dpformer.statement.build import statement
from dpformer.verification.verify import Verification, verify
from tests.tiny_runs import invoke, printed, refused
from tests.training.conftest import tiny_config
from tests.training.logs import write_log

PUBLIC = ["--assume-items-public"]  # a log of 60 users has too few for a private list of items
CHOICES: dict[str, Any] = {"private_metrics": True, "metrics_share": 0.1, "seed": None, "epochs": 2}


@pytest.fixture(scope="module", params=["transformer", "counts"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    config = tiny_config(write_log(folder / "log.csv"), model=request.param, **CHOICES)
    return train(config, folder / "run").folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def facts_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "privacy.json").read_text())


def checked(run: Path) -> Verification:
    return verify(run, dataset=load_dataset(Config.make(run / "config.toml")))


def wrong(run: Path) -> set[str]:
    return {finding.name for finding in checked(run).findings if finding.ok is False}


# The budget.


@pytest.mark.parametrize("model", ["transformer", "counts"])
def test_one_budget_pays_for_all(tmp_path: Path, model: str) -> None:
    config = tiny_config(tmp_path / "log.csv", model=model, **CHOICES).resolve(users=600, threads=1)
    plan, without = make_plan(config, 600), make_plan(config.replace(private_metrics=False), 600)
    assert plan.noise_of("metrics") is not None and without.noise_of("metrics") is None
    assert plan.noise_multiplier > without.noise_multiplier, "training gets more noise, to make room"
    assert epsilon_of(plan.events, plan.delta) <= 4 < epsilon_of([*without.events, *plan.releases[-2:]], plan.delta)


def test_the_hash_of_a_config_tells_whether_metrics_are_released(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "log.csv")
    assert config.hash() != config.replace(private_metrics=True).hash()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": float("inf")}, "private_metrics needs a budget"),
        ({"metrics_share": 0.0}, "private_metrics needs a budget"),
        ({"metrics_share": 0.99}, "leave nothing for training"),
        ({"task": "lm", "unit": "line"}, "private_metrics applies to logs of items"),
    ],
)
def test_what_cannot_be_paid_for_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DpformerError, match=message):
        tiny_config(tmp_path / "log.csv", **{**CHOICES, "model": "transformer", **changes})


def test_repeats_are_released_with_the_metrics_and_ranked_by_their_weight(tmp_path: Path) -> None:
    """A log in which everyone comes back to the first item: the share is said, and the model with weight finds it."""
    log = tmp_path / "log.csv"
    rows = [f"u{user},i{item % 20},{place}" for user in range(400) for place, item in enumerate(_again(user))]
    log.write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    common = ("train", log, "--model", "counts", *PUBLIC, "--private-metrics", "--metrics-share", "0.2")
    said = printed(*common, "--out", tmp_path / "plain")
    assert "of the held-out items are repeats" in said and "--allow-seen" in said
    assert facts_of(tmp_path / "plain")["metrics"]["hit@10"] < 0.2, "a repeat is a miss"
    said = printed(*common, "--repeat-weight", "0.1", "--out", tmp_path / "run")
    facts = facts_of(tmp_path / "run")["metrics"]
    assert "seen items ranked too" in said and facts["repeats"] > 0.9 and facts["hit@10"] > 0.9
    assert checked(tmp_path / "run").passed
    assert "seen items ranked too" in printed("evaluate", tmp_path / "run", "--private-metrics", "--allow-seen")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("repeat_weight = 0.1", "repeat_weight = 0.2"))
    assert {"constants of the model"} <= wrong(tmp_path / "run")


def _again(user: int) -> list[int]:
    return [user, user + 3, user + 7, user]


def test_networks_have_no_weight_of_repeats(tmp_path: Path) -> None:
    with pytest.raises(DpformerError, match="repeat_weight applies to counts, but model is gru"):
        tiny_config(tmp_path / "log.csv", model="gru", repeat_weight=0.1)


# The release.


def test_the_ledger_holds_what_was_done(made: Path) -> None:
    facts, config = facts_of(made), Config.make(made / "config.toml")
    plan = make_plan(config, facts["users"])
    (event,) = [event for event in facts["events"] if event["label"] == "metrics"]
    assert event["noise_multiplier"] == plan.noise_of("metrics") and facts["epsilon"] <= 4 and facts["private"]
    release = MetricRelease.from_dict(facts["metrics"], Gaussian(event["noise_multiplier"], label="metrics"))
    exact = user_values(*served_ranks(finished(made).release.model, load_dataset(config)), 10).sum(0)
    noise = (np.array(release.sums) - exact) / event["noise_multiplier"]
    assert 1e-3 < np.abs(noise).max() < 6, "of the released model, and noisy"
    assert any("may be published" in sentence and "NDCG@10" in sentence for sentence in facts["words"])


def test_verify_accepts_it(made: Path) -> None:
    result = checked(made)
    unchecked = {finding.name for finding in result.findings if finding.ok is None}
    assert result.passed and unchecked <= {"signature"}, result.to_dict()


def test_a_run_that_died_at_the_end_draws_the_same_noise_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two noisy versions of the same metrics, averaged, would be less noisy than what is paid for."""
    config = tiny_config(write_log(tmp_path / "log.csv"), **CHOICES)
    write, first = RunFolder.write_json, []

    def dying(self: RunFolder, path: Path, content: dict[str, Any]) -> None:
        if path == self.statement:
            first.append(content)
            raise KeyboardInterrupt
        write(self, path, content)

    monkeypatch.setattr(RunFolder, "write_json", dying)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run")
    monkeypatch.undo()
    assert resume(tmp_path / "run").statement == first[0] and "metrics" in first[0]
    again = train(config, tmp_path / "again").statement  # another run, another key
    assert again["metrics"]["sums"] != first[0]["metrics"]["sums"]


def test_nobody_with_a_held_out_item_is_no_error(tmp_path: Path) -> None:
    """That would tell something exact about the data, at the end of a long run."""
    (tmp_path / "log.csv").write_text(
        "user_id,item_id,timestamp\n" + "".join(f"u{u},i{u % 5},{t}\n" for u in range(40) for t in (0, 1))
    )
    facts = train(tiny_config(tmp_path / "log.csv", **CHOICES), tmp_path / "run").statement
    assert 0 <= facts["metrics"]["ndcg@10"] <= 1 and checked(tmp_path / "run").passed


@pytest.mark.parametrize("factor", [0.0, 0.001, 1000.0])  # 30 times nearly nothing is nothing odd, once in 500 runs
def test_verify_finds_noise_that_is_missing_or_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    normal = SecureRandom.normal
    monkeypatch.setattr(
        SecureRandom,
        "normal",
        lambda self, count, **at: normal(self, count, **at) * (factor if "metrics" in self.context else 1),
    )
    train(tiny_config(write_log(tmp_path / "log.csv"), **CHOICES), tmp_path / "run")
    monkeypatch.undo()
    assert wrong(tmp_path / "run") == {"metrics"}


# Statements that are not true.


def forge(run: Path, **changes: Any) -> None:
    """Rewrites the statement consistently, all words included, with other metrics or another ledger."""
    from dpformer.accounting.events import Event
    from dpformer.statement.build import headline, words

    facts = facts_of(run)
    if "events" in changes:
        kept = [
            Event.from_dict({name: value for name, value in event.items() if name != "epsilon_alone"})
            for event in changes["events"]
        ]
        facts["epsilon"] = epsilon_of(kept, facts["delta"])
    facts.update(changes)
    facts = {name: value for name, value in facts.items() if value is not None or name not in changes}
    facts.update(headline=headline(facts), words=words(facts))
    (run / "privacy.json").write_text(json.dumps(facts))


def test_metrics_that_the_ledger_does_not_hold_are_found(run: Path) -> None:
    forge(run, events=[event for event in facts_of(run)["events"] if event["label"] != "metrics"])
    assert {"statement", "ledger", "metrics"} <= wrong(run)


def test_metrics_that_were_never_paid_for_are_found(tmp_path: Path) -> None:
    """A run without them, to whose statement the exact ones are added."""
    config = tiny_config(write_log(tmp_path / "log.csv"), seed=None, epochs=1)
    run = train(config, tmp_path / "run").folder
    forge(
        run,
        metrics={
            "of": "test items",
            "ndcg@10": 0.5,
            "hit@10": 0.6,
            "repeats": 0.0,
            "deviation": 0.01,
            "sums": [1.0, 1.0, 2.0, 0.0],
        },
    )
    assert {"statement", "metrics"} <= wrong(run)


def test_a_statement_without_an_event_for_them_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="metrics are stated, but the ledger does not hold them"):
        statement(
            [Gaussian(8.0, label="frequencies")], delta=1e-3, target=4.0, clipping="clip", clip_norm=1.0,
            expected_batch_size=10, users=1000, seeded=False, data=[], hashes={}, stated={"metrics": {"ndcg@10": 0.1}},
        )  # fmt: skip


def test_changed_metrics_are_found(run: Path) -> None:
    metrics = facts_of(run)["metrics"]
    forge(run, metrics={**metrics, "ndcg@10": 0.9})
    assert wrong(run) == {"metrics"}
    grid = public_grid(next(e["noise_multiplier"] for e in facts_of(run)["events"] if e["label"] == "metrics"))
    better = MetricRelease((metrics["sums"][0] + 2**16 * grid, *metrics["sums"][1:]), _event(run))
    forge(run, metrics=better.to_dict())
    assert wrong(run) == {"metrics"}, "consistent, and on the grid, but not of this model"
    forge(run, metrics=None)
    assert "metrics" in wrong(run), "paid for, and gone"


def test_exact_metrics_in_their_place_are_found(run: Path) -> None:
    config = Config.make(run / "config.toml")
    exact = user_values(*served_ranks(finished(run).release.model, load_dataset(config)), 10).sum(0)
    grid = public_grid(_event(run).noise_multiplier)
    sums = tuple(float(part) for part in np.round(exact / grid) * grid)
    forge(run, metrics=MetricRelease(sums, _event(run)).to_dict())
    assert wrong(run) == {"metrics"}


def _event(run: Path) -> Gaussian:
    event = next(event for event in facts_of(run)["events"] if event["label"] == "metrics")
    return Gaussian(event["noise_multiplier"], label="metrics")


# The counts of a released model.


def spoil(run: Path, change: Any) -> None:
    from tests.cli.test_verify import saved_again

    saved_again(run, change=change)


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    log = write_log(tmp_path / "log.csv", users=800)
    return train(tiny_config(log, model="counts", epsilon=20.0, seed=None), tmp_path / "run").folder


def test_exact_counts_in_a_model_of_counts_are_found(counts: Path) -> None:
    assert checked(counts).passed

    def whole_numbers(model: Any) -> None:
        rows = np.repeat(np.arange(model.num_items), model.offsets.diff().numpy())
        raw = np.random.default_rng(0).integers(1, 40, len(rows)).astype(float)
        model.chances.copy_(torch.from_numpy(raw / (np.bincount(rows, weights=raw)[rows] + 30)))

    spoil(counts, whole_numbers)
    assert "constants of the model" in wrong(counts)


def test_a_few_counts_near_whole_numbers_are_chance(counts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair has two counts that are often equal: an honest run was found wrong once in fifty."""

    def few(model: Any) -> tuple[np.ndarray, ...]:
        rows, chances, found = counts_of(model)
        return rows, chances, np.where(np.arange(len(found)) < 2, 3.001, 1e9)  # the rest is too large to tell

    monkeypatch.setattr("dpformer.kinds.counts.counts_of", few)
    assert checked(counts).passed


@pytest.mark.parametrize("name", ["popularity", "chances", "targets"])
def test_other_buffers_of_a_model_of_counts_are_found(counts: Path, name: str) -> None:
    changes = {
        "popularity": lambda model: model.popularity.copy_(model.popularity.flip(0)),
        "chances": lambda model: model.chances.mul_(30),  # rows that sum to more than 1
        "targets": lambda model: model.targets[:1].copy_((model.offsets.diff() > 0).nonzero()[0]),  # itself
    }
    spoil(counts, changes[name])
    assert "constants of the model" in wrong(counts)


# The command line.


@pytest.mark.parametrize("model", ["transformer", "counts"])
def test_from_the_command_line(tmp_path: Path, model: str) -> None:
    log, run = write_log(tmp_path / "log.csv"), tmp_path / "run"
    small = ["--epochs", 1, "--dim", 8, "--batch-size", 20] if model == "transformer" else []
    said = printed(
        "train", log, "--model", model, "--private-metrics", "--max-length", 6, "--out", run, *small, *PUBLIC
    )
    released = facts_of(run)["metrics"]
    line = f"ndcg@10 {released['ndcg@10']:.4f}  hit@10 {released['hit@10']:.4f}"
    assert line in said and "(covered by ε)" in said
    text = " ".join(printed("evaluate", run, "--samples", 10).split())
    assert text.index(" ".join(line.split())) < text.index("not covered by the privacy guarantee")
    assert json.loads(printed("evaluate", run, "--json", "--samples", 10))["private_metrics"] == released
    assert invoke("verify", run).exit_code == 0
    log.unlink()  # nothing is measured again
    assert json.loads(printed("evaluate", run, "--private-metrics", "--json"))["metrics"] == released
    assert line in printed("evaluate", run, "--private-metrics")
    printed("report", run, "--public")
    page = (run / "report.html").read_text()
    assert f"{released['ndcg@10']:.4f}" in page and "Noisy metrics: " in page


def test_evaluate_refuses_to_release_more(tmp_path: Path) -> None:
    config = tiny_config(write_log(tmp_path / "log.csv"), epochs=1)
    run = train(config, tmp_path / "run").folder
    assert "no private metrics and no budget" in refused("evaluate", run, "--private-metrics")
    assert "released once" in refused("evaluate", run, tmp_path / "log.csv", "--private-metrics")


def test_seeded_metrics_promise_nothing(tmp_path: Path) -> None:
    run = train(tiny_config(write_log(tmp_path / "log.csv"), **{**CHOICES, "seed": 5}), tmp_path / "run").folder
    assert "NOT PRIVATE" in printed("evaluate", run, "--private-metrics").splitlines()[-1]


def test_a_few_noisy_frequencies_that_happen_to_be_whole_are_no_alarm(tmp_path: Path) -> None:
    """Five items: a noisy count on a grid is a whole number by chance, once in a hundred runs."""
    (tmp_path / "log.csv").write_text(
        "user_id,item_id,timestamp\n" + "".join(f"u{u},i{(u + t) % 5},{t}\n" for u in range(40) for t in (0, 1, 2))
    )
    train(tiny_config(tmp_path / "log.csv", **CHOICES), tmp_path / "run")
    found = next(finding for finding in checked(tmp_path / "run").findings if finding.name == "frequencies")
    assert found.ok and "too few" in found.detail
