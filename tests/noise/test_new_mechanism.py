"""A third mechanism, all of it in this file: training, ledger, statement, report, verification and audit know it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpformer.accounting import PoissonGaussian
from dpformer.accounting.events import ASSUMED_CLIPPED
from dpformer.accounting.units import UnitOfPrivacy
from dpformer.noise import Noise
from dpformer.noise.mechanisms import noise_of, register
from dpformer.report import write_report
from dpformer.runs import Config, train
from dpformer.sampling import PoissonBatches
from dpformer.training.optimizer import PrivateOptimizer
from dpformer.verification.audit import audit
from dpformer.verification.verify import verify
from tests.training.conftest import tiny_config
from tests.training.logs import write_log


@dataclass(frozen=True)
class PairedGaussian(PoissonGaussian):
    kind = "paired_gaussian"
    adds_up = False
    rest: int

    @property
    def compositions(self) -> int:
        return -(-self.steps // (2 + self.rest))

    @property
    def rate(self) -> float:
        return (2 + self.rest) * self.sample_rate


@register
@dataclass(frozen=True)
class Paired(Noise):
    """A part of each step's noise is taken back in the next one; users rest for `rest` steps more than they need to."""

    event_type = PairedGaussian
    sampler = "Poisson, within groups that rest"
    rest: int

    @property
    def groups(self) -> int:
        return 2 + self.rest

    def coefficients(self) -> np.ndarray:
        return np.array([0.8, 0.599])

    @property
    def name(self) -> str:
        return "noise in pairs"

    def sentence(self, facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        return f"In {facts['steps']} steps every {unit.name} rested for {self.rest}."

    def drawn(self, unit: UnitOfPrivacy) -> str:
        return "Noise comes in pairs."

    def rows(self, sample_rate: float, unit: UnitOfPrivacy) -> list[tuple[str, str]]:
        return [("steps of rest", str(self.rest))]


def test_its_noise_and_its_users() -> None:
    noise = Paired(1)
    p = torch.nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
    sizes: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "clip_norm": 1.0,
        "expected_batch_size": 1.0,
        "assume_clipped": True,
    }
    private = PrivateOptimizer(torch.optim.SGD([p], lr=1.0), **sizes, noise=noise, seed=0)
    batches = PoissonBatches(3000, 0.2, 6, noise=noise, seed=0)
    rows = []
    for batch in batches:
        assert (batches.groups(0, 3000)[batch.users] == (batches.step - 1) % 3).all()
        private.zero_grad()
        private.step(batch)
        assert p.grad is not None
        rows.append(p.grad.numpy().copy())
    matrix = 0.8 * np.eye(6) + 0.599 * np.eye(6, k=-1)
    white = matrix @ np.stack(rows)
    np.testing.assert_allclose(white @ white.T / p.numel(), np.eye(6), atol=9 / p.numel() ** 0.5)
    label = f"training ({ASSUMED_CLIPPED})"  # of gradients that nobody made
    assert private.event() == PairedGaussian(1.0, 0.2, 6, rest=1, label=label, private=False)


def test_a_run_from_training_to_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the option is missing: a field of `Config`, which a mechanism for everybody would have."""
    monkeypatch.setattr(Config, "noise", property(lambda self: Paired(1)))
    run = train(tiny_config(write_log(tmp_path / "log.csv"), seed=None, epochs=2), tmp_path / "run").folder
    result = verify(run)
    assert result.passed, result
    facts = json.loads((run / "privacy.json").read_text())
    assert (facts["rest"], facts["sampler"]) == (1, "Poisson, within groups that rest")
    assert facts["events"][-1]["kind"] == "paired_gaussian" and noise_of(facts) == Paired(1)
    assert any("every user rested for 1" in sentence for sentence in facts["words"])
    page = write_report(run, out=tmp_path / "report.html").read_text()
    assert "Noise comes in pairs." in page and "Steps of rest" in page
    monkeypatch.setattr(Config, "noise", property(lambda self: Paired(2)))
    assert not verify(run).passed


def test_its_audit() -> None:
    claim: dict[str, Any] = {"noise_multiplier": 2.0, "sample_rate": 0.15, "steps": 42, "delta": 1e-3}
    result = audit(**claim, noise=Paired(1), canaries=1500, seed=0)
    assert result.passed, result.verdict
    assert 0.3 * result.epsilon_claimed < result.epsilon_lower < 1.4 * result.epsilon_claimed, "give or take chance"
    assert result.to_dict()["mechanisms"][0]["rest"] == 1


def test_what_no_mechanism_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little noise, users too close to each other, users counted too rarely: refused for every mechanism."""
    with pytest.raises(ValueError, match="correlated over 2 steps and needs as many groups"):
        Paired(-1)
    monkeypatch.setattr(Paired, "coefficients", lambda self: np.array([0.9, 0.6]))
    with pytest.raises(ValueError, match="a norm of at most 1"):
        Paired(1)
    monkeypatch.undo()
    monkeypatch.setattr(PairedGaussian, "compositions", 1)
    with pytest.raises(ArithmeticError, match="counts fewer participations"):
        Paired(1).event(1.0, 0.1, 10)
    with pytest.raises(ValueError, match="both have the setting bands"):

        @register
        @dataclass(frozen=True)
        class Other(Paired):
            bands: int = 1

    with pytest.raises(ValueError, match="choose one kind of noise"):
        noise_of({"bands": 2, "rest": 1})
