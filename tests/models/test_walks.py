"""Thresholds that know two-step walks: against plain loops in float64, and what they do to noise."""

import dataclasses
import math

import numpy as np
import pytest

from dpformer.models import walks
from dpformer.models.walks import log_lifts, with_walks
from dpformer.queries.frequencies import FrequencyRelease
from dpformer.queries.transitions.rounds import TransitionRelease


def release_of(total: np.ndarray, deviation: float = 1.0, size: int = 12) -> TransitionRelease:
    """Totals (size, size), those above the diagonal, of all pairs."""
    pairs = np.array([(a, b) for b in range(size) for a in range(b)])
    p = np.full(size, 0.1)
    frequencies = FrequencyRelease(p, p * 100, p > 0, None, 100)
    values = total[pairs[:, 0], pairs[:, 1]]
    return TransitionRelease(np.arange(size), pairs, values, deviation, 0 * values, 1.0, frequencies, None)


def naive_lifts(release: TransitionRelease) -> list[float]:
    """The formulas of walks.py, one item at a time."""
    size = len(release.items)
    table = [[0.0] * size for _ in range(size)]
    for (a, b), total in zip(release.pairs.tolist(), release.total.tolist(), strict=True):
        table[a][b] = table[b][a] = max(total - 1.5 * release.total_deviation, 0)
    x = [sum(row) for row in table]

    def between(a: int, b: int) -> float:
        return sum(table[a][c] * table[c][b] / (x[c] + 30) for c in range(size))

    y = [sum(between(a, b) for b in range(size)) for a in range(size)]
    lifts = []
    for a, b in release.pairs.tolist():
        chance = math.sqrt(y[a] * y[b] * x[a] * x[b]) / max(sum(x), 1e-300)
        lifts.append(math.log(min(max(between(a, b) / max(chance, 1e-300), 0.02), 50)))
    return lifts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("at_once", [1, 30, 1 << 23])
def test_lifts_are_those_of_plain_loops(seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "AT_ONCE", at_once)
    release = release_of(np.random.default_rng(seed).normal(1, 3, (12, 12)))
    np.testing.assert_allclose(log_lifts(release), naive_lifts(release), atol=1e-9)
    np.testing.assert_allclose(
        with_walks(1.5, release), np.clip(1.5 - 0.25 * (np.array(naive_lifts(release)) - 1), 0, 5), atol=1e-9
    )


def test_a_pair_within_a_group_loses_less_than_one_between_groups() -> None:
    """Two groups of items that are met together; the weakest pair inside, and noise as strong between the groups."""
    group = np.arange(12) // 6
    total = np.where(group[:, None] == group, 20.0, 0.0)
    total[0, 1] = total[1, 7] = 3.0
    release = release_of(total)
    places = {tuple(pair): place for place, pair in enumerate(release.pairs.tolist())}
    taken = with_walks(1.5, release)
    assert taken[places[0, 1]] < 1.75 < 2.2 < taken[places[1, 7]]


def test_attributes_and_walks_add_up() -> None:
    release = release_of(np.random.default_rng(0).normal(1, 3, (12, 12)))
    plain = np.full(len(release.total), 2.5)
    np.testing.assert_allclose(with_walks(plain, release) - with_walks(2.0, release), 0.5)


def test_without_noise_or_pairs_nothing_changes() -> None:
    release = release_of(np.random.default_rng(0).normal(1, 3, (12, 12)), deviation=0.0)
    assert with_walks(1.5, release).tolist() == [1.5] * len(release.total)
    none = dataclasses.replace(
        release, pairs=release.pairs[:0], total=release.total[:0], difference=release.total[:0], total_deviation=1.0
    )
    assert len(with_walks(1.5, none)) == 0
    nothing = release_of(np.full((12, 12), -3.0))
    assert np.isfinite(with_walks(1.5, nothing)).all()


def test_many_walks_are_cut_to_the_clearest_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = release_of(np.random.default_rng(1).normal(3, 3, (12, 12)))
    everything = walks._followed(release, np.maximum(release.total - 1.5, 0))
    assert everything.tolist() == (release.total > 1.5).tolist()
    monkeypatch.setattr(walks, "WORK", 100)
    some = walks._followed(release, np.maximum(release.total - 1.5, 0))
    assert 0 < some.sum() < everything.sum()
    assert release.total[some].min() > release.total[~some].max()
    assert (np.bincount(release.pairs[some].ravel()) ** 2).sum() <= 100
    assert np.isfinite(log_lifts(release)).all()
