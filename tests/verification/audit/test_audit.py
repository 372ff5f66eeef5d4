"""The audit on a correct build: its parts against naive twins, its statistics against sampling, and what it shows."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.accounting import PoissonGaussian
from dpformer.errors import DpformerError
from dpformer.models import Batch
from dpformer.verification.audit import Mechanism, Observation, audit, observe
from dpformer.verification.audit.bound import (
    assumption_free,
    clopper_pearson,
    effective_noise,
    epsilon_at,
    guess,
    total_variation,
)
from dpformer.verification.audit.canaries import LOUD, SPARE, WIDTH, CanaryTable, canary_data
from dpformer.verification.audit.checks import _dispersion, _largest, _overlap, checks, contribution_checks
from dpformer.verification.audit.observation import _log_ratio

CLAIM: dict[str, Any] = {"noise_multiplier": 1.2, "sample_rate": 0.2, "steps": 32, "delta": 1e-3}


@pytest.fixture(scope="module")
def seen() -> Observation:
    return observe(Mechanism(1.2, 0.2, 40, clip_norm=0.3, clipping="clip"), 1000, seed=4)


# Canaries.


@settings(max_examples=20)
@given(count=st.integers(1, 300), seed=st.integers(0, 100))
def test_a_canary_is_one_coordinate(count: int, seed: int) -> None:
    model = CanaryTable(count, clip_norm=0.5)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.table)
    canary = seed % count
    batch = Batch.from_histories(canary_data([canary], count).histories([0]), 2)
    (loss,) = model(batch)
    (gradient,) = torch.autograd.grad(loss, [model.table])
    expected = torch.zeros(model.table.numel())
    expected[canary] = LOUD * 0.5
    assert torch.equal(gradient.flatten(), expected)
    assert model.table.numel() >= count + SPARE * WIDTH


# Observation.


def test_the_score_is_the_likelihood_ratio() -> None:
    rng = np.random.default_rng(0)
    q, sigma, o = 0.2, 1.3, rng.normal(size=50) * 2
    naive = [
        math.log((1 - q) * _density(x, 0, sigma) + q * _density(x, 1, sigma)) - math.log(_density(x, 0, sigma))
        for x in o
    ]
    np.testing.assert_allclose(_log_ratio(o, q, sigma), naive, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(_log_ratio(o, 1.0, sigma), (2 * o - 1) / (2 * sigma**2))
    assert np.isfinite(_log_ratio(np.array([1e6, -1e6]), q, 0.01)).all()


def _density(x: float, mean: float, sigma: float) -> float:
    return math.exp(-((x - mean) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))


def test_what_is_observed_has_the_claimed_sizes(seen: Observation) -> None:
    assert seen.noise.shape == (40, (~seen.member).sum()) and seen.inclusion.shape == (40, seen.member.sum())
    assert seen.noise.std() == pytest.approx(1, abs=0.03) and seen.inclusion.mean() == pytest.approx(0.2, abs=0.01)
    mean, error = seen.contribution
    assert abs(mean - 1) < 6 * error
    assert seen.same_batches and seen.restart == 20 and seen.other_run is None
    assert all(check.passed for check in checks(seen))


def test_members_score_higher(seen: Observation) -> None:
    assert seen.scores[seen.member].mean() > 0.5 > -0.5 > seen.scores[~seen.member].mean()


def test_a_seed_repeats_and_no_seed_does_not(seen: Observation) -> None:
    mechanism = Mechanism(1.2, 0.2, 4)
    first, again, other = (observe(mechanism, 200, seed=seed) for seed in (1, 1, None))
    assert np.array_equal(first.scores, again.scores) and other.other_run is not None
    assert not np.array_equal(first.scores, other.scores)


def test_everybody_in_every_batch() -> None:
    seen = observe(Mechanism(9.0, 1.0, 30), 400, seed=0)
    assert all(check.passed for check in checks(seen)) and seen.inclusion.all()


# The bound.


def test_clopper_pearson_covers() -> None:
    """Of bounds with 95% confidence at most 5% lie below the truth."""
    rng = np.random.default_rng(0)
    for truth in (0.02, 0.26, 0.45):
        draws = rng.binomial(400, truth, 4000)
        below = np.mean([clopper_pearson(int(errors), 400, 0.05) < truth for errors in draws])
        assert 0.02 < below < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
    assert clopper_pearson(10, 10, 0.05) == 1


def test_total_variation_bounds_the_best_test() -> None:
    """The likelihood ratio test at threshold 0 reaches it, by sampling."""
    q, sigma, steps, n = 0.2, 1.2, 32, 100_000
    rng = np.random.default_rng(0)
    scores = np.zeros((2, n))
    for _ in range(steps):
        o = sigma * rng.standard_normal((2, n))
        o[1] += rng.random(n) < q
        scores += _log_ratio(o, q, sigma)
    advantage = (scores[1] > 0).mean() - (scores[0] > 0).mean()
    tv = total_variation(PoissonGaussian(sigma, q, steps))
    assert advantage - 4 / math.sqrt(n) < tv < advantage + 0.01


def test_effective_noise_inverts_total_variation() -> None:
    claimed = PoissonGaussian(1.2, 0.2, 32)
    for sigma in (0.8, 2.0):
        error = (1 - total_variation(PoissonGaussian(sigma, 0.2, 32))) / 2
        assert effective_noise(error, claimed) == pytest.approx(sigma, rel=2e-3)
    assert effective_noise(0.5, claimed) == math.inf and epsilon_at(math.inf, claimed, 1e-3) == 0
    assert effective_noise(0.0, claimed) < 1.2 / 16


def test_the_bound_without_assumptions() -> None:
    """Randomised response at ε errs with probability 1/(1 + e^ε), no better."""
    assert assumption_free(1 / (1 + math.exp(2.0)), 0.0) == pytest.approx(2.0)
    assert assumption_free(0.5, 1e-3) == 0


def test_guesses_count_both_errors() -> None:
    scores, member = np.array([1.0, -1.0, 2.0, -3.0]), np.array([True, True, False, False])
    guesses = guess(scores, member, 0.9)
    assert (guesses.false_positives, guesses.false_negatives, guesses.errors) == (1, 1, 2)
    assert guesses.error_at_most == clopper_pearson(2, 4, 1 - 0.9)


def test_ten_thousand_canaries_show_most_of_epsilon() -> None:
    result = audit(noise_multiplier=1.0, sample_rate=0.15, steps=40, delta=1 / 6040, seed=0)
    assert 0.7 * result.epsilon_claimed <= result.epsilon_lower <= 1.15 * result.epsilon_claimed
    assert result.passed and 0 < result.epsilon_lower_any < result.epsilon_lower


# Checks: p-values are those of chance when all is well.


def test_p_values_of_pairs_and_dispersion_are_honest() -> None:
    rng = np.random.default_rng(0)
    names = []
    for _ in range(300):
        a = rng.random((30, 60)) < 0.15
        names += [_dispersion("d", a.sum(1), 60, 0.15), _overlap("o", a, 0.15)]
        names += [_largest("l", rng.standard_normal((12, 40)))]
    for name in "dol":
        low = np.mean([check.p_value < 0.05 for check in names if check.name == name])
        assert low < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300), name
    assert np.mean([check.p_value < 0.2 for check in names if check.name != "o"]) > 0.1, "and not far above"


# What it says.


def test_users_who_count_twice_are_seen_beside_those_who_count_not_at_all() -> None:
    """Their mean is right; how far single users are from 1 is not."""
    noise, sigma = np.random.default_rng(0).normal(size=4000), 0.5
    for added, accused in ((1.0, False), (np.tile([2.0, 0.0], 2000), True), (np.tile([1.4, 0.6], 2000), True)):
        x = (added + sigma * noise - 1) / sigma
        found = list(contribution_checks((1.0, 0.01), (float(np.square(x).sum()), len(x))))
        assert found[0].passed and found[1].passed is not accused
    assert all(check.passed for check in contribution_checks((1.0, 0.01), (0.0, 0)))


def test_the_result_as_json_and_as_a_picture(tmp_path: Path) -> None:
    result = audit(**CLAIM, canaries=300, seed=2)
    facts = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert facts["passed"] and facts["verdict"].startswith(
        "Nothing speaks against the claim: ε of training is at least"
    )
    assert facts["mechanism"]["steps"] == 32 and len(facts["checks"]) == 19
    for name in ("audit.svg", "audit.png"):
        result.plot(tmp_path / name)
    assert b"<svg" in (tmp_path / "audit.svg").read_bytes()
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DpformerError, match=r"audit.txt is no picture .* ending in .svg or .png"):
        result.plot(tmp_path / "audit.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a finite number above 0"),
        ({"sample_rate": 1.5}, "sample_rate must be in"),
        ({"steps": 2}, "steps must be a whole number of at least 4"),
        ({"canaries": 10}, "canaries is 10; fewer than 100 show nothing"),
        ({"confidence": 1.0}, "confidence is 1.0; it must be at least 0.5 and below 1"),
        ({"delta": 0.0}, "delta must be strictly between 0 and 1"),
        ({"clipping": "no"}, "clipping is 'no'; it must be normalize or clip"),
    ],
)
def test_bad_arguments_are_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit(**{**CLAIM, **changes})
