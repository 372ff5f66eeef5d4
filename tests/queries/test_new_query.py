"""A query of one's own, all of it in this file: plan, ledger, statement, resume, verification and audit know it."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dpformer.accounting.events import Event, Gaussian
from dpformer.findings import Finding
from dpformer.noise import SecureRandom
from dpformer.noise.randomness import public_grid
from dpformer.queries import registry
from dpformer.queries.base import ALARM, Answer, Arrays, Canaries, Inspection, Query, Question
from dpformer.queries.registry import register
from dpformer.runs import Config, resume, train
from dpformer.runs.model_file import sha256_of
from dpformer.training.plan import Plan
from dpformer.verification.audit import audit_query
from dpformer.verification.verify import verify
from tests.training.conftest import tiny_config
from tests.training.crash import Crash, crash_after
from tests.training.logs import write_log

BOUNDS = np.array([2, 4, 8, 16])  # histories of up to so many items, or more


class LengthsQuery(Query):
    """How long histories are: every user is in one cell of a histogram, so the sensitivity is 1."""

    label = "lengths"
    sentence = "how long histories are"
    stated = "lengths"

    def asked(self, config: Config) -> bool:
        return config.private

    def share(self, config: Config) -> float:
        return 0.02

    def run(self, question: Question, event: Event, random: SecureRandom) -> Answer:
        noisy = exact(question.dataset) + event.noise_multiplier * random.normal(len(BOUNDS) + 1, step=0)
        grid = public_grid(event.noise_multiplier)
        return Answer(np.round(noisy / grid) * grid, self.event(question.config, event.noise_multiplier))

    def facts(self, value: Any) -> dict[str, Any]:
        return {"up_to": BOUNDS.tolist(), "users": value.tolist()}

    def arrays(self, value: Any, config: Config) -> dict[str, np.ndarray]:
        return {"lengths": value}

    def array_kinds(self, name: str) -> tuple[type, int] | None:
        return (np.float64, 1) if name == "lengths" else None

    def restore(self, arrays: Arrays, config: Config, plan: Plan) -> np.ndarray:
        return np.asarray(arrays["lengths"])

    def checks(self, seen: Inspection) -> Iterator[Callable[[], Finding]]:
        yield lambda: self.noise(seen)

    def noise(self, seen: Inspection) -> Finding:
        from scipy import stats

        arrays = seen.arrays()
        if seen.dataset is None or arrays is None:
            return Finding("noise of lengths", None, "not checked: the data was not read")
        sigma = next(event.noise_multiplier for event in seen.events() if event.label == self.label)
        squares = float(np.square((arrays["lengths"] - exact(seen.dataset)) / sigma).sum())
        return Finding("noise of lengths", min(stats.chi2.cdf(squares, 5), stats.chi2.sf(squares, 5)) >= ALARM)

    def canaries(self, event: Gaussian, member: np.ndarray, seed: int | None = None) -> Canaries:
        """Each canary alone in a data set of its own, in the last cell."""
        random, noise = SecureRandom("lengths", seed=seed), event.noise_multiplier
        seen = member + noise * random.normal(len(member), step=0)
        return Canaries(seen, noise, seen[None, ~member] / noise)


def exact(dataset: Any) -> np.ndarray:
    _, offsets = dataset.packed_train()
    return np.bincount(np.searchsorted(BOUNDS, np.diff(offsets)), minlength=len(BOUNDS) + 1).astype(np.float64)


@pytest.fixture(autouse=True)
def lengths(monkeypatch: pytest.MonkeyPatch) -> LengthsQuery:
    monkeypatch.setattr(registry, "_added", [])
    return register(LengthsQuery())


@pytest.mark.parametrize("model", ["counts", "transformer"])
def test_a_run_from_plan_to_verification(model: str, tmp_path: Path) -> None:
    from dpformer.runs import load_dataset

    log = write_log(tmp_path / "log.csv", users=300)
    done = train(
        tiny_config(log, model=model, seed=None, **({} if model == "counts" else {"epochs": 1})), tmp_path / "r"
    )
    facts = json.loads((done.folder / "privacy.json").read_text())
    assert [event["label"] for event in facts["events"]].count("lengths") == 1 and facts["epsilon"] <= 4
    assert any("queried once for how long histories are" in sentence for sentence in facts["words"])
    assert sum(facts["lengths"]["users"]) == pytest.approx(300, abs=60 * math.sqrt(5))
    data = load_dataset(done.config)
    result = verify(done.folder, dataset=data)
    assert result.passed and {"noise of lengths": True}.items() <= {f.name: f.ok for f in result.findings}.items(), (
        result
    )
    quiet = load_file(done.folder / "releases.safetensors") | {"lengths": exact(data)}
    save_file(quiet, done.folder / "releases.safetensors")
    facts["hashes"]["releases"] = sha256_of(done.folder / "releases.safetensors")
    (done.folder / "privacy.json").write_text(json.dumps(facts))
    wrong = [finding.name for finding in verify(done.folder, dataset=data).findings if finding.ok is False]
    assert wrong == ["noise of lengths"], "the noise was taken off"


def test_it_is_asked_once_even_if_the_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_log(tmp_path / "log.csv", users=200)
    config = tiny_config(log, epochs=2, checkpoint_seconds=0.0)
    whole = train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        crash_after(patch, 3)
        with pytest.raises(Crash):
            train(config, tmp_path / "broken")
    again = resume(tmp_path / "broken")
    assert (
        again.statement["lengths"] == whole.statement["lengths"]
        and again.statement["events"] == whole.statement["events"]
    )
    names = ("model.safetensors", "releases.safetensors")
    assert all((again.folder / name).read_bytes() == (whole.folder / name).read_bytes() for name in names)


def test_less_noise_than_planned_is_never_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LengthsQuery.run

    def careless(self: LengthsQuery, question: Question, event: Event, random: SecureRandom) -> Answer:
        return honest(self, question, self.event(question.config, event.noise_multiplier / 2), random)

    monkeypatch.setattr(LengthsQuery, "run", careless)
    with pytest.raises(RuntimeError, match="differ from the plan"):
        train(tiny_config(write_log(tmp_path / "log.csv"), model="counts"), tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_its_audit(lengths: LengthsQuery, monkeypatch: pytest.MonkeyPatch) -> None:
    claim: dict[str, Any] = {"noise_multiplier": 2.0, "delta": 1e-3, "canaries": 4000, "seed": 0}
    result = audit_query(lengths, **claim)
    assert result.passed, result.verdict
    assert 0.5 * result.epsilon_claimed < result.epsilon_lower < 1.4 * result.epsilon_claimed, "give or take chance"
    honest = lengths.canaries

    def quiet(self: LengthsQuery, event: Gaussian, member: np.ndarray, seed: int | None) -> Canaries:
        return honest(Gaussian(event.noise_multiplier / 2), member, seed)

    monkeypatch.setattr(LengthsQuery, "canaries", quiet)
    assert not audit_query(lengths, **claim).passed


def test_a_label_is_given_once() -> None:
    with pytest.raises(ValueError, match="a query with the label 'lengths' already exists"):
        register(LengthsQuery())


def test_queries_that_leave_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LengthsQuery, "share", lambda self, config: 1.0)
    with pytest.raises(Exception, match="leave nothing for training"):
        Config.make(model="counts")
