"""Sums of a round by every engine: the same whole numbers, and no user counts for more than one."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from dpformer.data.duckdb_sums import duckdb_sums
from dpformer.releases.counts import release_transition_sums
from dpformer.releases.sums import GRID, LONGEST, WEIGHTS, ArraySums, Sums

ITEMS = 11


def packed(histories: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends = np.cumsum([len(history) for history in histories])
    return np.concatenate(histories).astype(np.int32), ends - [len(history) for history in histories], ends


@contextmanager
def spark_sums(items: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Iterator[Sums]:
    pytest.importorskip("pyspark", reason="Spark is not installed")
    from dpformer.data.spark_sums import local_spark, spark_sums

    with local_spark() as session:
        yield spark_sums(session, items, starts, stops)


ENGINES = {"duckdb": duckdb_sums, "spark": spark_sums}


def crafted() -> list[np.ndarray]:
    """Repeats, self pairs, one item, nothing, and ordinary users."""
    rng = np.random.default_rng(0)
    odd = [[0, 1] * 500, [3] * 40, [5], [], [2, 2, 2, 4, 4], list(range(ITEMS)) * 30]
    usual = [rng.integers(0, ITEMS, rng.integers(1, 25)).tolist() for _ in range(60)]
    return [np.array(history, dtype=np.int64) for history in (*odd, *usual)]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gives_the_same_release(engine: str) -> None:
    arrays = packed(crafted())
    twin = ArraySums(*arrays)
    places = np.where(np.arange(ITEMS) == 3, -1, np.arange(ITEMS) - (np.arange(ITEMS) > 3))
    with ENGINES[engine](*arrays) as sums:
        np.testing.assert_array_equal(sums.items(ITEMS), twin.items(ITEMS))
        cells, counts = sums.all_pairs(places)
        for found, expected in zip((cells, counts), twin.all_pairs(places), strict=True):
            np.testing.assert_array_equal(found, expected)
        for directed in (False, True):
            np.testing.assert_array_equal(
                sums.pairs(places, cells[::2], directed), twin.pairs(places, cells[::2], directed)
            )
        releases = [release_transition_sums(each, ITEMS, 0.4, seed=7) for each in (sums, twin)]
    for name in ("items", "pairs", "total", "difference"):
        np.testing.assert_array_equal(getattr(releases[0], name), getattr(releases[1], name))
    np.testing.assert_array_equal(releases[0].frequencies.counts, releases[1].frequencies.counts)


def test_weights_leave_room_for_the_longest_history() -> None:
    assert (sum(WEIGHTS) * LONGEST) ** 2 < 2**63
    assert all(weight > 0 for weight in WEIGHTS) and sorted(WEIGHTS, reverse=True) == list(WEIGHTS)


@pytest.mark.parametrize(
    "history",
    [
        np.tile([0, 1], 600_000),  # one pair, as often as can be
        np.random.default_rng(1).integers(0, 1000, 1_000_000),  # a million items
        np.arange(1000),
    ],
    ids=["one pair", "a million items", "all different"],
)
def test_a_crafted_user_counts_for_one(history: np.ndarray) -> None:
    alone = ArraySums.packed(history, np.array([0, len(history)]))
    cells, q = alone.all_pairs(np.arange(1000))
    norm = np.linalg.norm(q.astype(np.float64))
    assert 0.99 * GRID < norm <= GRID
    for directed in (False, True):
        again = alone.pairs(np.arange(1000), cells, directed).astype(np.float64)
        assert 0.99 * GRID < np.linalg.norm(again) <= GRID
    assert np.linalg.norm(alone.items(1000).astype(np.float64)) <= GRID
