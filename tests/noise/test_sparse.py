"""Exact thresholded sampling against noise on every cell: the same distribution, cell by cell and together."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpformer.noise import sparse
from dpformer.noise.randomness import SecureRandom, public_grid
from dpformer.noise.sparse import _successes, _truncated_normal, noisy_above, tail

RANDOM = SecureRandom("test", seed=0)
CELLS, VALUES = np.array([3, 4, 17]), np.array([0.4, 2.0, 1.1])
NUM_CELLS, DEVIATION, THRESHOLD, TRIALS = 20, 0.8, 0.9, 3000


@pytest.fixture(scope="module")
def tables() -> np.ndarray:
    """(TRIALS, NUM_CELLS): what survived, 0 elsewhere."""
    out = np.zeros((TRIALS, NUM_CELLS))
    for trial, row in enumerate(out):
        cells, values = noisy_above(
            [(CELLS, VALUES)], NUM_CELLS, deviation=DEVIATION, threshold=THRESHOLD, random=RANDOM, step=trial
        )
        row[cells] = values
    return out


@pytest.fixture(scope="module")
def dense() -> np.ndarray:
    """The naive twin: noise on every cell, then the threshold."""
    truth = np.zeros(NUM_CELLS)
    truth[CELLS] = VALUES
    noisy = truth + DEVIATION * np.random.default_rng(0).standard_normal((TRIALS, NUM_CELLS))
    return np.where(noisy > THRESHOLD, noisy, 0)


def test_each_cell_survives_as_often_as_it_should(tables: np.ndarray) -> None:
    truth = np.zeros(NUM_CELLS)
    truth[CELLS] = VALUES
    for cell in range(NUM_CELLS):
        p = tail((THRESHOLD - truth[cell]) / DEVIATION)
        assert stats.binomtest(int((tables[:, cell] > 0).sum()), TRIALS, p).pvalue > 1e-4


def test_values_are_those_of_the_dense_release(tables: np.ndarray, dense: np.ndarray) -> None:
    for cell in (0, 3, 4, 17, 19):
        found, expected = tables[:, cell], dense[:, cell]
        assert stats.ks_2samp(found[found > 0], expected[expected > 0]).pvalue > 1e-4


def test_cells_are_independent(tables: np.ndarray) -> None:
    counts = (tables[:, np.setdiff1d(np.arange(NUM_CELLS), CELLS)] > 0).sum(1)
    n, p = NUM_CELLS - len(CELLS), tail(THRESHOLD / DEVIATION)
    expected = stats.binom.pmf(np.arange(8), n, p) * TRIALS
    observed = np.bincount(counts, minlength=8)[:8]
    assert stats.chisquare([*observed, TRIALS - observed.sum()], [*expected, TRIALS - expected.sum()]).pvalue > 1e-4
    correlation = np.corrcoef((tables > 0).T)
    assert np.abs(correlation - np.eye(NUM_CELLS)).max() < 5 / math.sqrt(TRIALS)


@pytest.mark.parametrize("low", [-1.0, 0.5, 2.0, 6.0])
def test_tail_values_are_exact(low: float) -> None:
    drawn = _truncated_normal(20_000, low, RANDOM, 10**6)
    assert stats.kstest(drawn, lambda x: 1 - stats.norm.sf(x) / stats.norm.sf(low)).pvalue > 1e-3


@pytest.mark.parametrize("p", [0.9, 0.16, 1e-3])
def test_gaps_make_independent_trials(p: float) -> None:
    found = _successes(400_000, p, RANDOM, 10**6 + 1)
    assert stats.binomtest(len(found), 400_000, p).pvalue > 1e-3
    assert stats.kstest(found / 400_000, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("trials", "p"), [(10**9, 1e-3), (10**12, 1e-6), (4 * 10**6, 0.3)])
def test_gaps_are_as_long_as_they_should_be(trials: int, p: float) -> None:
    """A million successes: gaps that are long by a fiftieth, or by one in a hundred thousand cells, are seen."""
    found = _successes(trials, p, RANDOM, 10**6 + 7)
    gaps = np.diff(found, prepend=-1)
    assert stats.binomtest(len(found), trials, p).pvalue > 1e-3
    edges = np.unique(stats.geom.ppf(np.linspace(0, 1, 21)[1:-1], p))
    observed = np.bincount(np.searchsorted(edges, gaps), minlength=len(edges) + 1)
    expected = np.diff(stats.geom.cdf(edges, p), prepend=0, append=1) * len(gaps)
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_gaps_are_those_of_the_words() -> None:
    """The naive twin, one gap at a time in the words' order."""
    p, step = 2e-3, 10**6 + 8
    cell, wanted = -1, []
    for word in RANDOM.words(400, step=step, stream=1).tolist():
        cell += 1 + math.floor(math.log((word + 1) / 2**64) / math.log1p(-p))
        wanted.append(cell)
    found = _successes(150_000, p, RANDOM, step)
    assert 200 < len(found) < 400 and found.tolist() == wanted[: len(found)]


def test_trials_beyond_one_chunk_of_draws() -> None:
    found = _successes(4_000_000, 0.5, RANDOM, 10**6 + 2)
    assert stats.binomtest(len(found), 4_000_000, 0.5).pvalue > 1e-3 and (np.diff(found) > 0).all()
    assert stats.kstest(found / 4_000_000, "uniform").pvalue > 1e-3


def test_a_trillion_cells() -> None:
    cells, values = noisy_above(
        [(np.array([5]), np.array([99.0]))], 10**12, deviation=1.0, threshold=5.5, random=RANDOM, step=10**6 + 3
    )
    expected = tail(5.5) * 10**12  # 19,000
    assert abs(len(cells) - 1 - expected) < 5 * math.sqrt(expected)
    assert cells[0] >= 0 and cells[-1] < 10**12 and values.min() > 5.49 and values.max() > 90


@settings(max_examples=60)
@given(
    st.dictionaries(st.integers(0, 99), st.floats(0, 50), max_size=10),
    st.floats(0.05, 20),
    st.floats(-2, 4),
    st.integers(0, 10**9),
)
def test_what_survives_is_sorted_above_and_on_the_grid(table, deviation, level, step) -> None:
    occupied = np.array(sorted(table), dtype=np.int64)
    truth = np.array([table[cell] for cell in sorted(table)])
    cells, values = noisy_above(
        [(occupied, truth)], 100, deviation=deviation, threshold=level * deviation, random=RANDOM, step=step
    )
    grid = public_grid(deviation)
    assert (np.diff(cells) > 0).all() and (cells >= 0).all() and (cells < 100).all()
    assert (values > level * deviation - grid).all()
    np.testing.assert_array_equal(values / grid, np.round(values / grid))


@settings(max_examples=40)
@given(
    st.dictionaries(st.integers(0, 99), st.floats(0, 50), max_size=30),
    st.lists(st.integers(0, 30), max_size=4).map(sorted),
    st.floats(-2, 4),
    st.integers(1, 30),
)
def test_how_a_table_is_cut_into_blocks_does_not_show(table, cuts, level, passed_at_once) -> None:
    occupied = np.array(sorted(table), dtype=np.int64)
    truth = np.array([table[cell] for cell in sorted(table)])
    blocks = list(zip(np.split(occupied, cuts), np.split(truth, cuts), strict=True))  # some of them are empty
    options: dict[str, Any] = {"deviation": 1.0, "threshold": level, "random": RANDOM, "step": 0}
    whole = noisy_above([(occupied, truth)], 100, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "PASSED_AT_ONCE", passed_at_once)
        cut = noisy_above(blocks, 100, **options)
    np.testing.assert_array_equal(whole, cut)


@pytest.mark.parametrize("cells", [[3, 3], [4, 2], [-1, 2], [5, 10]])
def test_cells_must_rise_within_the_table(cells: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cells must increase strictly within 0\.\.9"):
        noisy_above([(np.array(cells), np.ones(2))], 10, deviation=1.0, threshold=0.0, random=RANDOM, step=0)
    with pytest.raises(ValueError, match=r"cells must increase strictly within 0\.\.9"):
        one_by_one = [(np.array([cell]), np.ones(1)) for cell in cells]
        noisy_above(one_by_one, 10, deviation=1.0, threshold=0.0, random=RANDOM, step=0)


def test_no_cells_at_all() -> None:
    cells, values = noisy_above(
        [(np.zeros(0, np.int64), np.zeros(0))], 0, deviation=1.0, threshold=1.0, random=RANDOM, step=0
    )
    assert len(cells) == len(values) == 0
