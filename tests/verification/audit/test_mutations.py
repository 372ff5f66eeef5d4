"""Faults put into the pipeline on purpose, the size of those seen in the wild: the audit must accuse each of them.

Where something faster than the audit stands in the way (the engine's proof, the check of the clip function), it is
shown to do so, and then switched off to see that the audit would have found the fault too.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpformer.clipping import PhantomClipping, UnsupportedUse, engine, normalize, parameter_norms
from dpformer.noise import Banded, Noise
from dpformer.noise.mechanisms import NoiseHistory
from dpformer.noise.noisy_sums import Numbers
from dpformer.sampling import PoissonBatches
from dpformer.training import plan
from dpformer.training.optimizer import PrivateOptimizer
from dpformer.verification.audit import Audit, Mechanism, audit, observe
from dpformer.verification.audit.checks import checks

CLAIM: dict[str, Any] = {"noise_multiplier": 1.2, "sample_rate": 0.2, "steps": 32, "delta": 1e-3}


def audited(canaries: int = 4000, **changes: Any) -> Audit:
    return audit(**{**CLAIM, "canaries": canaries, "seed": 0, **changes})


def assert_accused(result: Audit, *names: str) -> None:
    """By the canaries themselves, beyond the claim, and by the checks of these names."""
    assert not result.passed and result.verdict.startswith("FLAGGED")
    assert result.epsilon_lower > 1.1 * result.epsilon_claimed
    assert {"canaries guessed wrong", *names} <= {check.name for check in result.checks if not check.passed}


def accusations(canaries: int = 1500, steps: int = 32, seed: int | None = 0) -> set[str]:
    """The checks alone, without the bound on ε."""
    mechanism = Mechanism(CLAIM["noise_multiplier"], CLAIM["sample_rate"], steps)
    member = np.random.default_rng(seed).random(canaries) < 0.5
    return {check.name for check in checks(observe(mechanism, member, seed=seed)) if not check.passed}


def test_a_correct_build_passes() -> None:
    result = audited()
    assert result.passed, result.verdict
    assert 0.3 * result.epsilon_claimed < result.epsilon_lower < 1.4 * result.epsilon_claimed, "give or take chance"


def scaled_noise(monkeypatch: pytest.MonkeyPatch, factor: Callable[[Tensor], Tensor]) -> None:
    noise = PrivateOptimizer._noise

    def wrong(self: PrivateOptimizer, *given: Any) -> list[Numbers]:
        return [replace(made, ready=factor(made.all())) for made in noise(self, *given)]

    monkeypatch.setattr(PrivateOptimizer, "_noise", wrong)


def test_noise_times_seven_tenths(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_noise(monkeypatch, lambda made: 0.7 * made)
    assert_accused(audited(), "noise: standard deviation")


def test_noise_of_each_rank_divided_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes add N(0, (σ/4)²) each: together half of what is due."""
    generator = torch.Generator().manual_seed(0)

    def of_ranks(made: Tensor) -> Tensor:
        return torch.stack([torch.randn(made.shape, generator=generator, dtype=made.dtype) / 4 for _ in range(4)]).sum(
            0
        )

    scaled_noise(monkeypatch, of_ranks)
    assert_accused(audited(), "noise: standard deviation")


def test_twice_the_sample_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PoissonBatches", lambda n, q, steps, **k: PoissonBatches(n, 2 * q, steps, **k))
    assert_accused(audited(), "inclusion: rate")


def test_clipping_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalize, "__call__", lambda self, norms: torch.ones_like(norms))
    with pytest.raises(ValueError, match="the clip function promises norms up to 1"):
        audited()
    monkeypatch.setattr(
        PhantomClipping, "_factors", staticmethod(lambda finite, norms, upper, clip: (clip(norms), bool(finite.all())))
    )
    assert_accused(audited(), "contribution of one user, in clip norms")


def test_norms_that_miss_the_tied_cross_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Opacus and fastDP have them for a functional tie: √2 too small here, so a user counts √2 too much."""
    monkeypatch.setattr(parameter_norms, "inner", lambda one, other: torch.zeros(()))
    with pytest.raises(UnsupportedUse, match="disagrees with autograd"):
        audited()
    monkeypatch.setattr(engine, "compare_with_autograd", lambda *_: True)
    assert_accused(audited(), "contribution of one user, in clip norms")


def test_noise_used_again_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score cannot see it; the correlation of steps before and after the restart does."""
    load = PrivateOptimizer.load_state_dict

    def forgetful(self: PrivateOptimizer, state: dict[str, Any]) -> None:
        load(self, {**state, "steps": 0, "sampled": []})

    monkeypatch.setattr(PrivateOptimizer, "_address", lambda self, *_: self._random)
    monkeypatch.setattr(PrivateOptimizer, "load_state_dict", forgetful)
    assert "noise: any two steps, before and after a restart" in accusations()


def test_noise_that_does_not_depend_on_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint resumed with other data: the same noise twice, on different sums, can be subtracted."""
    make = PrivateOptimizer.__init__
    monkeypatch.setattr(PrivateOptimizer, "_address", lambda self, *_: self._random)
    monkeypatch.setattr(PrivateOptimizer, "__init__", lambda self, *a, **k: make(self, *a, **{**k, "context": ""}))
    assert accusations() == {"noise: resumed with other data"}


def test_the_same_noise_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is not drawn anew, as a forgotten seed would be."""
    make = PrivateOptimizer.__init__
    monkeypatch.setattr(PrivateOptimizer, "__init__", lambda self, *a, **k: make(self, *a, **{**k, "key": bytes(32)}))
    assert "noise: of another run" in accusations(seed=None)


def test_one_noise_for_all_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_noise(monkeypatch, lambda made: made.flatten()[0].expand(made.shape))
    assert {"noise: any two coordinates", "noise: all coordinates of a step"} <= accusations()


def test_noise_of_the_wrong_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform with the right deviation."""
    scaled_noise(monkeypatch, lambda made: (2 * torch.special.ndtr(made) - 1) * math.sqrt(3))
    assert "noise: normal distribution" in accusations()


class Shuffled(PoissonBatches):
    """Batches of fixed size from a shuffled list: each user once in an epoch."""

    def draw(self, step: int) -> np.ndarray:
        per_epoch = round(1 / self.sample_rate)
        order = np.random.default_rng(step // per_epoch).permutation(self.n)
        return np.sort(np.array_split(order, per_epoch)[step % per_epoch])


def test_shuffling_accounted_as_poisson_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PoissonBatches", Shuffled)
    assert {
        "inclusion: size of batches (independent users)",
        "inclusion: batches of a user (independent steps)",
        "inclusion: any two steps, before and after a restart",
    } <= accusations()


class Twins(PoissonBatches):
    """Two ranks with one seed: user k of the one goes with user k of the other."""

    def draw(self, step: int) -> np.ndarray:
        half = super().draw(step)
        half = half[half < self.n // 2]
        return np.concatenate([half, half + self.n // 2])


def test_ranks_that_sample_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PoissonBatches", Twins)
    assert {"inclusion: any two users", "inclusion: size of batches (independent users)"} <= accusations(600, 160)


class Stateless(PoissonBatches):
    """Ranks that do not share their key; in a private run the optimizer refuses such batches before the audit."""

    seeds = count(1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        other = PoissonBatches(1, 0.5, 1, seed=next(self.seeds))
        super().load_state_dict({**state, "random": other.state_dict()["random"]})


def test_processes_that_draw_different_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PoissonBatches", Stateless)
    assert "inclusion: two processes with one key agree" in accusations()


# Noise that is correlated over some steps.

BANDED: dict[str, Any] = {"noise_multiplier": 2.0, "sample_rate": 0.1, "steps": 42, "noise": Banded(4)}


def test_correlated_noise_passes() -> None:
    result = audited(**BANDED)
    assert result.passed, result.verdict
    assert 0.3 * result.epsilon_claimed < result.epsilon_lower < 1.4 * result.epsilon_claimed, "give or take chance"
    assert "inclusion: at most once in 4 steps" in {check.name for check in result.checks}


def test_coefficients_of_a_norm_above_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 1/2, 3/8, 5/16 as they are: nobody scaled them, and a user adds 1.2."""
    begin = NoiseHistory.__init__

    def unscaled(self: NoiseHistory, noise: Noise) -> None:
        begin(self, noise)
        self._coefficients = (noise.coefficients() * 1.22).tolist()

    monkeypatch.setattr(NoiseHistory, "__init__", unscaled)
    assert "noise: standard deviation" in {check.name for check in audited(**BANDED).checks if not check.passed}


def test_the_noise_of_past_steps_is_forgotten_on_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    load = PrivateOptimizer.load_state_dict

    def forgetful(self: PrivateOptimizer, state: dict[str, Any]) -> None:
        load(self, state)
        self._past._steps.clear()

    monkeypatch.setattr(PrivateOptimizer, "load_state_dict", forgetful)
    assert not audited(**{**BANDED, "steps": 16}).passed


class OutOfTurn(PoissonBatches):
    """Groups are not kept apart: everybody may be in every step, at q on average."""

    def draw(self, step: int) -> np.ndarray:
        words = self._random.words(self.n, step=step)
        return np.flatnonzero(words < np.uint64(int(self.sample_rate * 2**64)))


def test_correlated_noise_for_users_who_do_not_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PoissonBatches", OutOfTurn)
    accused = {check.name for check in audited(**BANDED).checks if not check.passed}
    assert "inclusion: at most once in 4 steps" in accused
