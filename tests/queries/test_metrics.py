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
from dpformer.queries.metrics import OF_ALL, OF_SERVED, MetricRelease, release_metrics, repeats_words, user_values

RANKS = torch.from_numpy(np.random.default_rng(0).integers(1, 40, 3000))


def seeded(seed: int) -> SecureRandom:
    return SecureRandom("test", seed=seed)


@given(st.integers(1, 10**6), st.integers(1, 50), st.booleans(), st.booleans())
def test_one_user_adds_at_most_one(rank: int, k: int, repeat: bool, filter_seen: bool) -> None:
    (values,) = user_values(torch.tensor([rank]), [repeat], k, filter_seen)
    assert np.linalg.norm(values) <= 1 and values[2] >= 0.5 - 1e-9, "and is counted, whatever the rank"
    assert (values[3] > 0) == repeat


@pytest.mark.parametrize("filter_seen", [True, False])
def test_the_bound_is_reached_by_a_perfect_rank(filter_seen: bool) -> None:
    """Scaled by more the noise would be more than is paid for; by less, it would be a lie."""
    (values,) = user_values(torch.tensor([1]), [not filter_seen], 10, filter_seen)
    assert np.linalg.norm(values) == pytest.approx(1)


def test_a_repeat_that_is_not_recommended_has_no_metrics() -> None:
    """Otherwise four parts of 1 would be scaled for three, a norm of 1.15: whatever the metric says of its rank."""
    (values,) = user_values(torch.tensor([1]), [True], 10)
    assert np.array_equal(values > 0, [False, False, True, True]) and np.linalg.norm(values) < 1


def test_the_share_of_repeats_is_near_the_exact_one() -> None:
    repeats = np.random.default_rng(1).random(len(RANKS)) < 0.19
    for filter_seen in (True, False):
        found = [
            release_metrics(RANKS, 20.0, repeats=repeats, filter_seen=filter_seen, random=seeded(seed))
            for seed in range(300)
        ]
        shares = np.array([release.repeats for release in found])
        assert shares.mean() == pytest.approx(repeats.mean(), abs=4 * shares.std() / math.sqrt(300))
        assert shares.std() == pytest.approx(found[0].deviation, rel=0.2)


def test_repeats_are_mentioned_if_noise_does_not_explain_them() -> None:
    def said(share: float, deviation: float, of: str) -> str:
        return repeats_words({"repeats": share, "deviation": deviation, "of": of})

    assert said(0.19, 0.005, OF_SERVED) == (
        "19.0% (± 1.0%) of the held-out items are repeats: the user already had them, and recommendations leave out "
        "such items; --allow-seen includes them, and --repeat-weight ranks them higher in a model of counts"
    )
    assert said(0.19, 0.005, OF_ALL).endswith("the user already had them")
    assert said(0.04, 0.005, OF_SERVED) == "" == said(0.09, 0.05, OF_SERVED)


def test_noise_has_the_deviation_of_the_event() -> None:
    """In units of the most that one user can add; noise forgotten, halved or scaled by √3 is far outside."""
    exact, z = user_values(RANKS, None, 10).sum(0), 5.0
    noise = np.array([release_metrics(RANKS, z, random=seeded(seed)).sums for seed in range(2000)]) - exact
    assert np.abs(noise.mean(0)).max() < 4.5 * z / math.sqrt(2000)
    # The sum of n squares over z² is χ²_n: deviation √(2n).
    for part in noise.T:
        assert abs(np.square(part / z).sum() - 2000) < 5 * math.sqrt(2 * 2000)
    assert abs(np.corrcoef(noise.T)[np.triu_indices(4, 1)]).max() < 5 / math.sqrt(2000)


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
    exact = [float(part) for part in user_values(RANKS, None, 10).sum(0)]
    for sums in (exact, [1.0, 2.0], [1.0, 2.0, None], None, [math.nan] * 4):
        with pytest.raises(ValueError, match="sums"):
            MetricRelease.from_dict({**release.to_dict(), "sums": sums}, release.event)


def test_exact_sums_and_wrong_noise_have_tiny_p_values() -> None:
    event = Gaussian(20.0, label="metrics")
    grid, exact = public_grid(20.0), user_values(RANKS, None, 10).sum(0)
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
    with pytest.raises(ValueError, match="one truth value per rank"):
        release_metrics(torch.tensor([1]), 5.0, repeats=[0.5])
