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
    any_mechanism,
    chance_of_so_many,
    clopper_pearson,
    epsilon_at,
    guess,
    noise_left,
    scaled,
    total_variation,
)
from dpformer.verification.audit.canaries import IN_SMALL, LOUD, SPARE, WIDTH, CanaryModel, canary_data
from dpformer.verification.audit.checks import _dispersion, _largest, _overlap, checks, contribution_checks
from dpformer.verification.audit.observation import Contribution
from dpformer.verification.audit.observer import _log_ratio

CLAIM: dict[str, Any] = {"noise_multiplier": 1.2, "sample_rate": 0.2, "steps": 32, "delta": 1e-3}


@pytest.fixture(scope="module")
def seen() -> Observation:
    return observe(Mechanism(1.2, 0.2, 40, clip_norm=0.3, clipping="clip"), half_of(1000, 4), seed=4)


def half_of(canaries: int, seed: int | None) -> np.ndarray:
    """Which of them take part."""
    return np.random.default_rng(seed).random(canaries) < 0.5


# Canaries.


@settings(max_examples=30)
@given(count=st.integers(1, 300), seed=st.integers(0, 400))
def test_a_canary_is_one_coordinate(count: int, seed: int) -> None:
    """Of whatever parameter it is in."""
    model = CanaryModel(count, clip_norm=0.5)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    canary = seed % count
    batch = Batch.from_histories(canary_data([canary], count).histories([0]), 2)
    (loss,) = model(batch)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    parameters = zip(model.parameters(), found, strict=True)
    gradient = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in parameters])
    expected = torch.zeros(len(gradient))
    expected[model.coordinates()[canary]] = LOUD * 0.5
    assert torch.allclose(gradient, expected)
    assert model.table.numel() >= count - IN_SMALL + SPARE * WIDTH and len(model.coordinates()) == count


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
    assert seen.noise.shape[0] == 40 and seen.inclusion.shape == (40, seen.member.sum())
    assert seen.noise.shape[1] > (~seen.member).sum(), "and what is nobody's"
    assert seen.noise.std() == pytest.approx(1, abs=0.03) and seen.inclusion.mean() == pytest.approx(0.2, abs=0.01)
    assert set(seen.columns) == {"scalar", "unused", "vector", "kernel_1d", "kernel_2d", "table"}
    for name, added in seen.contributions.items():
        assert abs(added.total / added.count - 1) < 6 * 1.2 / math.sqrt(added.count), name
    assert seen.same_batches and seen.restart == 20 and seen.runs is None
    assert all(check.passed for check in checks(seen))


def test_members_score_higher(seen: Observation) -> None:
    assert seen.scores[seen.member].mean() > 0.5 > -0.5 > seen.scores[~seen.member].mean()


def test_a_seed_repeats_and_no_seed_does_not(seen: Observation) -> None:
    mechanism = Mechanism(1.2, 0.2, 4)
    first, again, other = (observe(mechanism, half_of(200, 1), seed=seed) for seed in (1, 1, None))
    assert np.array_equal(first.scores, again.scores) and other.runs is not None
    assert not np.array_equal(first.scores, other.scores)


def test_everybody_in_every_batch() -> None:
    seen = observe(Mechanism(9.0, 1.0, 30), half_of(400, 0), seed=0)
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
    tv = total_variation([PoissonGaussian(sigma, q, steps)])
    assert advantage - 4 / math.sqrt(n) < tv < advantage + 0.01


def test_the_noise_that_is_left_inverts_total_variation() -> None:
    claimed = [PoissonGaussian(1.2, 0.2, 32), PoissonGaussian(3.0, 1.0, 1)]
    for share in (0.7, 1.6):
        error = (1 - total_variation(scaled(claimed, share))) / 2
        assert noise_left(error, claimed) == pytest.approx(share, rel=2e-3)
    assert noise_left(0.5, claimed) == math.inf and epsilon_at(math.inf, claimed, 1e-3) == 0
    assert noise_left(0.0, claimed) < 1 / 16


def test_the_bound_for_any_mechanism_is_that_of_the_paper() -> None:
    """Against the program in appendix D of Steinke et al. (2023), written out."""
    from scipy import stats

    def program(m: int, r: int, v: int, eps: float, delta: float) -> float:
        q = 1 / (1 + math.exp(-eps))
        beta, alpha, total = stats.binom.sf(v - 1, r, q), 0.0, 0.0
        for i in range(1, v + 1):
            total += stats.binom.pmf(v - i, r, q)
            alpha = max(alpha, total / i)
        return min(beta + alpha * delta * 2 * m, 1)

    for m, r, v, eps, delta in ((1000, 50, 48, 2.0, 1e-5), (1000, 1000, 700, 1.0, 1e-4), (200, 10, 10, 5.0, 0.0)):
        assert chance_of_so_many(v, r, m, eps, delta) == pytest.approx(program(m, r, v, eps, delta), rel=1e-9)


def test_the_bound_for_any_mechanism_holds_and_a_larger_delta_shows_less() -> None:
    """Randomised response for each canary, of ε = 2: it exceeds the truth in few of many audits."""
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        member = rng.random(1000) < 0.5
        answers = np.where(rng.random(1000) < 1 / (1 + math.exp(-2.0)), 1.0, -1.0) * (2 * member - 1)
        found.append(any_mechanism(answers, member, 1e-6, 0.95))
    assert np.mean(np.array(found) > 2.0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200) and np.median(found) > 0.5
    member = np.arange(1000) < 500
    shown = [any_mechanism(2.0 * member - 1, member, delta, 0.95) for delta in (0.0, 1e-5, 1e-3)]
    assert shown == sorted(shown, reverse=True) and shown[0] > 2.5 > shown[-1]


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
        one = Contribution(float(len(x)), float(np.square(sigma * x).sum()), len(x))
        found = list(contribution_checks(one, sigma))
        assert found[0].passed and found[1].passed is not accused
    assert all(check.passed for check in contribution_checks(Contribution(), 1.0))


def test_the_result_as_json_and_as_a_picture(tmp_path: Path) -> None:
    result = audit(**CLAIM, canaries=300, seed=2)
    facts = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert facts["passed"] and facts["verdict"].startswith("Consistent with the claim: ε of training is at least")
    assert facts["mechanisms"][0]["steps"] == 32 and len(facts["checks"]) == 23
    for name in ("audit.svg", "audit.png"):
        result.plot(tmp_path / name)
    assert b"<svg" in (tmp_path / "audit.svg").read_bytes()
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DpformerError, match=r"audit.txt: unsupported image format; use .svg or .png"):
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
