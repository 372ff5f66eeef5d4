"""Twelve faults, each put in on purpose: the audit, or a replay, or the run itself stops every one of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from dpformer.accounting import Ledger
from dpformer.accounting.events import Event
from dpformer.clipping import PhantomClipping
from dpformer.engines import sums
from dpformer.noise.randomness import SecureRandom
from dpformer.queries import frequencies, items
from dpformer.queries.registry import query_of
from dpformer.queries.transitions import rounds
from dpformer.runs import train
from dpformer.sampling import Batch, PoissonBatches
from dpformer.training import optimizer as optimizers
from dpformer.training import plan
from dpformer.training.optimizer import PrivateOptimizer
from dpformer.training.plan import Plan
from dpformer.training.steps_taken import StepsTaken
from dpformer.training.trainer import Trainer
from dpformer.verification.audit import Audit, audit, audit_query
from dpformer.verification.audit.checks import in_each_parameter
from dpformer.verification.audit.observation import Contribution
from tests.tiny_runs import copied, invoke, refused, tiny_run
from tests.training.conftest import tiny_config
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401

Fault = Callable[[pytest.MonkeyPatch], None]
TRAINING: dict[str, Any] = {"noise_multiplier": 1.2, "sample_rate": 0.2, "steps": 32, "delta": 1e-3}


def accused(result: Audit) -> set[str]:
    names = {check.name for check in result.checks if not check.passed}
    assert result.passed is not bool(names)
    return names


def scaled_noise(patch: pytest.MonkeyPatch, factor: Callable[[Tensor, Tensor], Tensor]) -> None:
    noise = PrivateOptimizer._noise

    def wrong(self: PrivateOptimizer, parameters: list[Tensor], finite: Any) -> list[Any]:
        made = zip(parameters, noise(self, parameters, finite), strict=True)
        return [replace(numbers, ready=factor(p, numbers.all())) for p, numbers in made]

    patch.setattr(PrivateOptimizer, "_noise", wrong)


# Training.


def noise_times_nine_tenths(patch: pytest.MonkeyPatch) -> None:
    scaled_noise(patch, lambda parameter, noise: 0.9 * noise)


def clip_times_eleven_tenths(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PhantomClipping, "_factors", staticmethod(lambda finite, norms, upper, clip: (1.1 * clip(norms), True))
    )


def twice_the_sample_rate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "PoissonBatches", lambda n, q, steps, **named: PoissonBatches(n, 2 * q, steps, **named))


def the_same_noise_in_every_step(patch: pytest.MonkeyPatch) -> None:
    in_turn = optimizers.in_turn
    patch.setattr(PrivateOptimizer, "_address", lambda self, *_: self._random)
    patch.setattr(optimizers, "in_turn", lambda random, step, counts: in_turn(random, 0, counts))


def vectors_without_noise(patch: pytest.MonkeyPatch) -> None:
    scaled_noise(patch, lambda parameter, noise: noise * (parameter.dim() != 1))


def a_step_too_few_in_the_ledger(patch: pytest.MonkeyPatch) -> None:
    events = PrivateOptimizer.events

    def fewer(self: PrivateOptimizer, *given: Any, **named: Any) -> tuple[Event, ...]:
        (counted,) = events(self, *given, **named)
        return (counted.repeated(counted.repeats - 1),)

    patch.setattr(PrivateOptimizer, "events", fewer)


def a_resumed_run_repeats_a_batch(patch: pytest.MonkeyPatch) -> None:
    restore = Trainer.restore

    def one_step_back(self: Trainer, state: dict[str, Any]) -> None:
        restore(self, state)
        self.step -= 1

    patch.setattr(Trainer, "restore", one_step_back)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (noise_times_nine_tenths, "noise: standard deviation"),
        (clip_times_eleven_tenths, "contribution of one user, in clip norms"),
        (twice_the_sample_rate, "inclusion: rate"),
        (the_same_noise_in_every_step, "noise: any two steps, before and after a restart"),
        (vectors_without_noise, "noise: standard deviation in each parameter"),
        (a_step_too_few_in_the_ledger, "ledger: the event of these steps"),
    ],
)
def test_a_fault_in_training_is_accused(fault: Fault, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert check in accused(audit(**TRAINING, canaries=3000, seed=0))


def test_a_resumed_run_that_repeats_a_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the token of the batch; without it the audit accuses."""
    a_resumed_run_repeats_a_batch(monkeypatch)
    with pytest.raises(ValueError, match="has been used"):
        audit(**TRAINING, canaries=200, seed=0)
    monkeypatch.setattr(Batch, "check_due", lambda self: None)
    monkeypatch.setattr(StepsTaken, "check", lambda self, batch: None)
    check = "inclusion: any two steps, before and after a restart"
    assert check in accused(audit(**TRAINING, canaries=3000, seed=0))


def test_a_parameter_in_which_users_add_more_is_accused() -> None:
    """A vector holds one canary in a hundred: what is wrong there hides in a mean over all."""
    fine, loud = Contribution(10_000.0, 0.0, 10_000), Contribution(400.0, 0.0, 200)
    assert in_each_parameter({"table": fine, "vector": Contribution(201.0, 0.0, 200)}, 1.0).passed
    found = in_each_parameter({"table": fine, "vector": loud}, 1.0)
    assert not found.passed and found.measured == "2 (vector)"


# Queries.

QUERY: dict[str, Any] = {"noise_multiplier": 0.8, "delta": 1e-3, "canaries": 1500, "seed": 0}


def asked(label: str, **changes: Any) -> set[str]:
    query = query_of(label)
    assert query is not None
    return accused(audit_query(query, **{**QUERY, **changes}))


def test_counts_with_too_little_noise_by_the_root_of_two_are_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    deviation = rounds.deviation_of
    monkeypatch.setattr(rounds, "deviation_of", lambda this, noise: deviation(this, noise) / 2**0.5)
    assert "noise: standard deviation" in asked("transition counts")


def test_counts_bounded_by_their_maximum_instead_of_their_norm_are_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with one pair is bounded either way: only canaries with many pairs see it."""

    def largest(keys: np.ndarray, width: int, given: np.ndarray | None = None) -> Any:
        weights = np.array(sums.WEIGHTS)[keys & 15]
        places, where = np.unique(keys >> 4, return_inverse=True)
        values = np.bincount(where, weights=weights).astype(np.int64)
        users, cells = places >> width.bit_length(), places & (1 << width.bit_length()) - 1
        most = np.zeros(int(users.max(initial=0)) + 1, dtype=np.int64)
        np.maximum.at(most, users, values)
        return cells, sums.quantised(values, most[users] ** 2)

    monkeypatch.setattr(sums, "_vectors", largest)
    found = asked("transition counts")
    assert "contribution of one user with many cells, in clip norms" in found


def test_frequencies_bounded_by_their_maximum_are_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    def each_one(users: np.ndarray, which: np.ndarray, num_users: int, num_items: int) -> np.ndarray:
        return np.bincount(np.unique(users * num_items + which) % num_items, minlength=num_items).astype(float)

    monkeypatch.setattr(frequencies, "user_counts", each_one)
    assert asked("frequencies") >= {"contribution of one user with many cells, in clip norms"}
    popularity = items.exact_popularity
    monkeypatch.setattr(items, "exact_popularity", lambda which, *given: np.ceil(popularity(which, *given)))
    assert asked("items")


@pytest.mark.parametrize("label", ["items", "transition counts"])
def test_a_list_of_items_without_a_threshold_is_accused(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = asked(label, failure=1e-5, canaries=500)
    assert honest == set()
    monkeypatch.setattr(items, "threshold_for", lambda delta, noise, *given: 0.0)
    assert "list: items of a single user" in asked(label, failure=1e-5, canaries=500)


@pytest.mark.parametrize("label", ["metrics", "items", "frequencies", "transition counts"])
def test_a_query_without_noise_is_accused(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecureRandom, "normal", lambda self, count, **address: np.zeros(count))
    assert "noise: standard deviation" in asked(label, canaries=300)


# The ledger.


def test_a_ledger_that_drops_an_event_releases_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Ledger.add
    monkeypatch.setattr(Ledger, "add", lambda self, event: event.label == "frequencies" or add(self, event))
    with pytest.raises(RuntimeError, match="nothing is released"):
        train(tiny_config(write_log(tmp_path / "log.csv"), epochs=1), tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_plan_and_a_ledger_that_drop_an_event_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing within the run could notice. `verify` makes the plan again, and a replay makes another model."""
    events, add = Plan.events, Ledger.add
    assert isinstance(events, property) and events.fget is not None
    whole = events.fget
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "add", lambda self, event: event.label == "frequencies" or add(self, event))
        patch.setattr(Plan, "events", property(lambda self: _training_of(whole(self))))
        patch.setattr("dpformer.queries.released.planned", lambda plan, query: _named(plan.releases, query.label))
        patch.setattr("dpformer.runs.session.planned", lambda plan, query: _named(whole(plan), "training"))
        patch.setattr("dpformer.runs.session.Session._compare_ledger", lambda self, due: None)
        config = tiny_config(write_log(tmp_path / "log.csv"), epochs=1, seed=None)
        train(config, tmp_path / "run", key_file=tmp_path / "key")
    held = json.loads((tmp_path / "run" / "privacy.json").read_text())["events"]
    assert [event["label"] for event in held] == ["training"]
    found = json.loads(invoke("verify", tmp_path / "run", "--replay", "--key-file", tmp_path / "key", "--json").stdout)
    assert {"ledger", "replay"} <= {one["name"] for one in found["findings"] if one["ok"] is False}
    assert "its config asks for frequencies (noise" in refused("audit", tmp_path / "run")


def test_an_audit_is_of_the_noise_that_the_config_asks_for(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """With twice the noise in the statement the audit was of twice the noise, and passed."""
    run = copied(tiny_run(tmp_path_factory, model="counts", seed=None), tmp_path)
    facts = json.loads((run / "privacy.json").read_text())
    facts["events"][-1]["noise_multiplier"] *= 2
    (run / "privacy.json").write_text(json.dumps(facts))
    assert "but its config asks for" in refused("audit", run)


def _training_of(events: tuple[Event, ...]) -> tuple[Event, ...]:
    return tuple(event for event in events if event.label == "training")


def _named(events: tuple[Event, ...], label: str) -> Event:
    return next(event for event in events if event.label == label)


# A run with several mechanisms.


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    log = write_log(folder / "log.csv", users=600, items=4)
    more = {"assume_items_public": False, "epsilon": 20.0, "warm_start": 0.4, "private_metrics": True, "epochs": 2}
    return train(tiny_config(log, seed=None, batch_size=60, **more), folder / "run").folder


def test_an_audit_of_a_run_covers_its_whole_ledger(warm: Path) -> None:
    """A warm start spends on counts and on training: "claimed is 1.94" was said of a run of ε = 5."""
    found = json.loads(invoke("audit", warm, "--canaries", 2000, "--seed", 1, "--json").stdout)
    statement = json.loads((warm / "privacy.json").read_text())
    labels = [event["label"] for event in statement["events"]]
    assert [one["of"] for one in found["mechanisms"]] == labels == ["transition counts", "metrics", "training"]
    assert found["passed"], found["verdict"]
    assert found["epsilon_claimed"] == pytest.approx(statement["epsilon"], rel=1e-6)
    assert 0.4 * statement["epsilon"] < found["epsilon_lower"] < 1.1 * statement["epsilon"]
    assert {check["of"] for check in found["checks"]} == {"", *labels}


def test_a_fault_in_one_of_several_mechanisms_is_accused(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deviation = rounds.deviation_of
    monkeypatch.setattr(rounds, "deviation_of", lambda this, noise: 0.7 * deviation(this, noise))
    found = json.loads(invoke("audit", warm, "--canaries", 1000, "--seed", 1, "--json").stdout)
    assert {check["of"] for check in found["checks"] if not check["passed"]} >= {"transition counts"}
    assert "training" not in {check["of"] for check in found["checks"] if not check["passed"]}
