"""The frequency release: sensitivity, noise, scale, floor; against a naive twin and real data."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpformer.accounting import Gaussian
from dpformer.queries import release_frequencies
from dpformer.queries.frequencies import _unpack, estimate, user_counts

Histories = list[list[int]]
histories_of = st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=15)


def counts_of(histories: Histories, num_items: int) -> np.ndarray:
    users, items, num_users = _unpack([np.array(history, dtype=np.int64) for history in histories], None)
    return user_counts(users, items, num_users, num_items)


def naive(histories: Histories, num_items: int) -> np.ndarray:
    counts = np.zeros(num_items)
    for history in histories:
        for item in set(history):
            counts[item] += 1 / math.sqrt(len(set(history)))
    return counts


@settings(max_examples=100)
@given(histories=histories_of)
def test_naive_twin(histories: Histories) -> None:
    """With empty histories, single items, repeated items."""
    np.testing.assert_allclose(counts_of(histories, 10), naive(histories, 10), rtol=1e-12, atol=0)


@settings(max_examples=100)
@given(histories=histories_of, user=st.lists(st.integers(0, 9), max_size=200))
def test_one_user_moves_the_counts_by_norm_one(histories: Histories, user: list[int]) -> None:
    """The guarantee rests on this: L2 sensitivity exactly 1 (0 for an empty history), repeats or not."""
    moved = counts_of([*histories, user], 10) - counts_of(histories, 10)
    assert np.linalg.norm(moved) == pytest.approx(1.0 if user else 0.0, abs=1e-12)


def test_a_user_with_only_repeated_items() -> None:
    assert counts_of([[3] * 1000], 5).tolist() == [0, 0, 0, 1, 0]
    assert counts_of([[], [2]], 3).tolist() == [0, 0, 1]


def test_noise_is_on_every_item() -> None:
    """Deviation z, normal, independent, on items nobody has as well."""
    num_items, z = 50_000, 8.0
    release = release_frequencies([np.array([0, 1])], num_items, z, seed=1)
    noise = release.counts[2:] / z
    assert noise.std() == pytest.approx(1, abs=0.015)
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) * math.sqrt(len(noise)) < 4


def test_counts_lie_on_a_public_grid() -> None:
    release = release_frequencies([np.arange(7)], 100, 3.0, seed=1)
    assert (release.counts * 2**9 == np.round(release.counts * 2**9)).all()  # 2⁻⁹ ≤ 3/1024 · 2


def test_event_and_marks() -> None:
    secret, seeded = release_frequencies([[0]], 3, 8.0), release_frequencies([[0]], 3, 8.0, seed=0)
    assert secret.event == Gaussian(8.0, label="frequencies") and secret.noise_multiplier == 8.0
    assert not seeded.event.private
    assert not np.array_equal(secret.counts, release_frequencies([[0]], 3, 8.0).counts)  # a new key each time
    np.testing.assert_array_equal(seeded.counts, release_frequencies([[0]], 3, 8.0, seed=0).counts)


@settings(max_examples=50)
@given(histories=histories_of, z=st.floats(0.01, 100), seed=st.integers(0, 5))
def test_p_is_positive_and_at_most_one(histories: Histories, z: float, seed: int) -> None:
    release = release_frequencies([np.array(h, dtype=np.int64) for h in histories], 10, z, seed=seed)
    assert release.p.shape == (10,)
    assert (release.p >= 1 / len(histories)).all() and (release.p <= 1).all()
    assert len(set(release.p[~release.detected])) <= 1  # the tail shares one value


def test_p_uses_only_what_is_released() -> None:
    """p is a function of noisy counts, z and N: two data sets with the same of these have the same p."""
    release = release_frequencies([np.arange(20)] * 50, 40, 2.0, seed=3)
    p, detected = estimate(release.counts, 2.0, 50)
    np.testing.assert_array_equal(release.p, p)
    np.testing.assert_array_equal(release.detected, detected)


def test_scale_is_right_for_equal_lengths() -> None:
    """With n_u = n for all, c_i·s/N is the document frequency itself."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 201)
    histories = [rng.choice(200, 9, replace=False, p=weights / weights.sum()) for _ in range(4000)]
    truth = np.bincount(np.concatenate(histories), minlength=200) / 4000
    release = release_frequencies(histories, 200, 1.0, seed=2)
    common = truth > 0.02
    np.testing.assert_allclose(release.p[common], truth[common], rtol=0.15)
    assert release.p.sum() == pytest.approx(9, rel=0.02)


def test_packed_input_is_the_same() -> None:
    histories = [np.array([1, 2, 2]), np.array([], dtype=np.int64), np.array([0])]
    packed = release_frequencies(
        np.concatenate(histories).astype(np.int32), 4, 1.0, offsets=np.array([0, 3, 3, 4]), seed=1
    )
    listed = release_frequencies(histories, 4, 1.0, seed=1)
    np.testing.assert_array_equal(packed.p, listed.p)
    assert packed.num_users == listed.num_users == 3


@pytest.mark.parametrize(
    ("histories", "num_items", "z", "options"),
    [
        ([[0, 3]], 3, 1.0, {}),  # an item outside the catalogue
        ([[-1]], 3, 1.0, {}),
        ([[0.5]], 3, 1.0, {}),
        ([["a"]], 3, 1.0, {}),
        ([[True]], 3, 1.0, {}),
        ([[[0]]], 3, 1.0, {}),
        ([], 3, 1.0, {}),
        ([[0]], 0, 1.0, {}),
        ([[0]], 3, 0.0, {}),
        ([[0]], 3, -1.0, {}),
        ([[0]], 3, math.nan, {}),
        ([0, 1], 3, 1.0, {"offsets": [0, 1]}),
        ([0, 1], 3, 1.0, {"offsets": [0, 2, 1, 2]}),
        ([0, 1], 3, 1.0, {"offsets": [1, 2]}),
    ],
)
def test_bad_input_is_refused(histories: list, num_items: int, z: float, options: dict) -> None:
    with pytest.raises(ValueError):
        release_frequencies(histories, num_items, z, **options)


def test_real_data(real_data: Path) -> None:
    """On ML-1M at z = 8: top items within 10%, tail pooled close to its mean (figures of the module's text)."""
    users, items = np.loadtxt(real_data / "ml-1m.txt", dtype=np.int64, usecols=(0, 1)).T
    order = np.argsort(users, kind="stable")
    histories = np.split(items[order] - 1, np.flatnonzero(np.diff(users[order])) + 1)
    histories = [history[-200:] for history in histories]
    truth = np.bincount(np.concatenate(histories), minlength=3416) / len(histories)
    release = release_frequencies(histories, 3416, 8.0, seed=0)
    top = np.argsort(-truth)[:100]
    assert (release.p[top] / truth[top]).mean() == pytest.approx(0.97, abs=0.04)
    seen = truth > 0
    pooled, cut = (
        np.log(release.p[seen] / truth[seen]),
        np.log(
            np.clip(release.counts[seen] * release.counts.sum() / len(histories) ** 2, 1 / len(histories), 1)
            / truth[seen]
        ),
    )
    assert np.abs(pooled).mean() < 0.8 * np.abs(cut).mean()
