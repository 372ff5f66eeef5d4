"""Metrics released with noise: what one user can add, how noisy they are, when the same noise is drawn again."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpformer.accounting import Gaussian
from dpformer.evaluation import hit, ndcg
from dpformer.noise import SecureRandom
from dpformer.noise.randomness import public_grid
from dpformer.queries.base import ALARM
from dpformer.queries.metrics import MetricRelease, release_metrics, scale_of, user_values

RANKS = torch.from_numpy(np.random.default_rng(0).integers(1, 40, 3000))


def seeded(seed: int) -> SecureRandom:
    return SecureRandom("test", seed=seed)


@given(st.integers(1, 10**6), st.integers(1, 50))
def test_one_user_adds_at_most_one(rank: int, k: int) -> None:
    (values,) = user_values(torch.tensor([rank]), k) / scale_of(3)
    assert np.linalg.norm(values) <= 1 and values[2] > 0.57, "and is counted, whatever the rank"


def test_the_bound_is_reached_by_a_perfect_rank() -> None:
    """Scaled by more than √3 the noise would be more than is paid for; by less, it would be a lie."""
    assert np.linalg.norm(user_values(torch.tensor([1]), 10) / scale_of(3)) == pytest.approx(1)


def test_noise_has_the_deviation_of_the_event() -> None:
    """In units of the most that one user can add; noise forgotten, halved or scaled by √3 is far outside."""
    exact, z = user_values(RANKS, 10).sum(0) / scale_of(3), 5.0
    noise = np.array([release_metrics(RANKS, z, random=seeded(seed)).sums for seed in range(2000)]) - exact
    assert np.abs(noise.mean(0)).max() < 4.5 * z / math.sqrt(2000)
    # The sum of n squares over z² is χ²_n: deviation √(2n).
    for part in noise.T:
        assert abs(np.square(part / z).sum() - 2000) < 5 * math.sqrt(2 * 2000)
    assert abs(np.corrcoef(noise.T)[np.triu_indices(3, 1)]).max() < 5 / math.sqrt(2000)


def test_values_are_near_the_exact_ones_and_vary_as_stated() -> None:
    releases = [release_metrics(RANKS, 20.0, random=seeded(seed)) for seed in range(300)]
    for name, exact in (("ndcg@10", float(ndcg(RANKS, 10))), ("hit@10", float(hit(RANKS, 10)))):
        values = np.array([release.values[name] for release in releases])
        assert values.mean() == pytest.approx(exact, abs=4 * values.std() / math.sqrt(300))
        assert values.std() == pytest.approx(releases[0].deviation, rel=0.2)
    assert releases[0].event == Gaussian(20.0, label="metrics", private=False)
    assert release_metrics(RANKS, 20.0).event.private


def test_the_same_address_gives_the_same_noise_and_no_address_never() -> None:
    assert release_metrics(RANKS, 20.0, random=seeded(3)) == release_metrics(RANKS, 20.0, random=seeded(3))
    other = release_metrics(RANKS, 20.0, random=seeded(3).within("other data"))
    assert other.sums != release_metrics(RANKS, 20.0, random=seeded(3)).sums
    assert release_metrics(RANKS, 20.0).sums != release_metrics(RANKS, 20.0).sums


def test_sums_are_on_a_public_grid() -> None:
    """The last bits of a floating-point sum would tell what was added."""
    grid = public_grid(20.0)
    assert all((part / grid).is_integer() for part in release_metrics(RANKS, 20.0).sums)


def test_it_survives_json_and_refuses_what_was_not_released_that_way() -> None:
    release = release_metrics(RANKS, 20.0, random=seeded(0))
    assert MetricRelease.from_dict(release.to_dict(), release.event) == release
    exact = [float(part) for part in user_values(RANKS, 10).sum(0) / scale_of(3)]
    for sums in (exact, [1.0, 2.0], [1.0, 2.0, None], None, [math.nan] * 3):
        with pytest.raises(ValueError, match="sums"):
            MetricRelease.from_dict({**release.to_dict(), "sums": sums}, release.event)


def test_exact_sums_and_wrong_noise_have_tiny_p_values() -> None:
    event = Gaussian(20.0, label="metrics")
    grid, exact = public_grid(20.0), user_values(RANKS, 10).sum(0) / scale_of(3)
    rounded = tuple(float(part) for part in np.round(exact / grid) * grid)
    assert MetricRelease(rounded, event).p_value(RANKS) < ALARM, "no noise"
    far = tuple(part + 200.0 for part in rounded)
    assert MetricRelease(far, event).p_value(RANKS) < ALARM, "other metrics"
    p_values = [release_metrics(RANKS, 20.0, random=seeded(seed)).p_value(RANKS) for seed in range(200)]
    assert min(p_values) > 1e-4 and np.mean(p_values) == pytest.approx(0.5, abs=0.1)


def test_metrics_of_nobody_are_noise_and_bad_ranks_are_refused() -> None:
    nobody = release_metrics(torch.zeros(0, dtype=torch.int64), 5.0)
    assert all(0 <= value <= 1 for value in nobody.values.values())
    with pytest.raises(ValueError, match="one number per user, from 1"):
        release_metrics(torch.tensor([0, 3]), 5.0)
    with pytest.raises(ValueError, match="noise_multiplier must be a finite number above 0"):
        release_metrics(torch.tensor([1]), 0.0)
