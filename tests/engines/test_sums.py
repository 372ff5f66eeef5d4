"""Sums of a round by every engine: the same whole numbers, and no user counts for more than one."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from dpformer.engines import duckdb_sums as duckdb_sums_module
from dpformer.engines import spark_sums as spark_sums_module
from dpformer.engines import sums as sums_module
from dpformer.engines.duckdb_sums import duckdb_sums
from dpformer.engines.spark_sums import spark_sums
from dpformer.engines.sums import (
    GRID,
    LONGEST,
    LONGEST_WEIGHTED,
    MOST_WEIGHT,
    WEIGHTS,
    ArraySums,
    Sums,
    gathered,
    quantised,
)
from dpformer.queries.transitions.rounds import release_transition_sums
from tests.engines.spark import spark  # noqa: F401

ITEMS = 11


def packed(histories: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends = np.cumsum([len(history) for history in histories])
    return np.concatenate(histories).astype(np.int32), ends - [len(history) for history in histories], ends


Opened = Callable[..., AbstractContextManager[Sums]]


@pytest.fixture(params=["numpy", "duckdb", "spark"])
def opened(request: pytest.FixtureRequest) -> Opened:
    """The sums of each engine, as a context."""
    if request.param == "duckdb":
        return duckdb_sums
    if request.param == "numpy":
        return lambda *arrays: nullcontext(ArraySums(*arrays))
    session = request.getfixturevalue("spark")
    return lambda *arrays: nullcontext(spark_sums(session, *arrays))


def crafted() -> list[np.ndarray]:
    """Repeats, self pairs, one item, nothing, and ordinary users."""
    rng = np.random.default_rng(0)
    odd = [[0, 1] * 500, [3] * 40, [5], [], [2, 2, 2, 4, 4], list(range(ITEMS)) * 30]
    usual = [rng.integers(0, ITEMS, rng.integers(1, 25)).tolist() for _ in range(60)]
    return [np.array(history, dtype=np.int64) for history in (*odd, *usual)]


def test_every_engine_gives_the_same_release(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duckdb_sums_module, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(spark_sums_module, "CELLS_AT_ONCE", 7)
    monkeypatch.setattr(spark_sums_module, "HISTORIES_AT_ONCE", 20)
    monkeypatch.setattr(duckdb_sums_module, "SUMS_AT_ONCE", 45)
    arrays = packed(crafted())
    twin = ArraySums(*arrays)
    places = np.where(np.arange(ITEMS) == 3, -1, np.arange(ITEMS) - (np.arange(ITEMS) > 3))
    with opened(*arrays) as sums:
        np.testing.assert_array_equal(sums.items(ITEMS), twin.items(ITEMS))
        cells, counts = gathered(sums.all_pairs(places))
        for found, expected in zip((cells, counts), gathered(twin.all_pairs(places)), strict=True):
            np.testing.assert_array_equal(found, expected)
        for directed in (False, True):
            np.testing.assert_array_equal(
                sums.pairs(places, cells[::2], directed), twin.pairs(places, cells[::2], directed)
            )
        near = np.arange(0, ITEMS * (ITEMS - 1) // 2, 3)
        np.testing.assert_array_equal(sums.shared(near, ITEMS), twin.shared(near, ITEMS))
        releases = [release_transition_sums(each, ITEMS, 0.4, near=near, seed=7) for each in (sums, twin)]
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
def test_a_crafted_user_counts_for_one(history: np.ndarray, opened: Opened, request: pytest.FixtureRequest) -> None:
    """Beside others, who come first: what the sums have more is one user's, and of norm 1 at most."""
    items = 1000
    if request.node.callspec.params["opened"] == "spark":  # whose workers run the code of arrays
        items = 200
        history = history[:5_000] % items
    others = [np.array([1, 2, 3]), np.array([5, 5, 6])]
    places, sums = np.arange(items), []
    for histories in ([*others, np.zeros(0, np.int64)], [*others, history]):
        with opened(*packed(histories)) as found:
            cells, q = gathered(found.all_pairs(places))
            sums.append((found.items(items), dict(zip(cells.tolist(), q.tolist(), strict=True)), found))
            if len(sums) == 2:
                survivors = cells
                both = [found.pairs(places, survivors, directed) for directed in (False, True)]
            else:
                most = np.arange(items * (items - 1) // 2)
                before = [found.pairs(places, most, directed) for directed in (False, True)]
    (items, pairs, _), (more_items, more_pairs, _) = sums
    assert np.linalg.norm((more_items - items).astype(float)) <= GRID
    added = np.array([value - pairs.get(cell, 0) for cell, value in more_pairs.items()], dtype=float)
    assert 0.99 * GRID < np.linalg.norm(added) <= GRID
    for directed in (False, True):
        old = before[directed].reshape(-1, 2)[survivors].ravel() if directed else before[directed][survivors]
        assert 0.99 * GRID < np.linalg.norm((both[directed] - old).astype(float)) <= GRID


@pytest.mark.parametrize("history", [[7] * 50, [7], []], ids=["self pairs", "one item", "nothing"])
def test_a_user_without_pairs_adds_none(history: list[int], opened: Opened) -> None:
    others = [np.array([1, 2, 3]), np.array(history, dtype=np.int64)]
    with opened(*packed(others)) as found:
        expected = gathered(ArraySums(*packed(others[:1])).all_pairs(np.arange(10)))
        for got, due in zip(gathered(found.all_pairs(np.arange(10))), expected, strict=True):
            np.testing.assert_array_equal(got, due)
        assert found.items(10)[7] <= GRID


def marked() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(items, weights, sessions) of the crafted users."""
    rng = np.random.default_rng(3)
    return [
        (history, rng.choice([1, 3, 100], len(history)), np.cumsum(rng.random(len(history)) < 0.2))
        for history in crafted()
    ]


def with_marks(users: list[tuple[np.ndarray, np.ndarray, np.ndarray]], *, weighted: bool, split: bool) -> list[Any]:
    weights, sessions = (np.concatenate([user[part] for user in users]) for part in (1, 2))
    arrays = packed([user[0] for user in users])
    return [*arrays, weights.astype(np.uint8) if weighted else None, sessions.astype(np.int32) if split else None]


def naive(history: np.ndarray, weights: np.ndarray, sessions: np.ndarray) -> dict[tuple[int, int], int]:
    """One user's vector, pair by pair: the weight of the later item counts, and only within a session."""
    vector: Counter[tuple[int, int]] = Counter()
    for later, item in enumerate(history.tolist()):
        for distance, weight in enumerate(WEIGHTS[:later], start=1):
            before = later - distance
            if history[before] != item and sessions[before] == sessions[later]:
                vector[int(history[before]), item] += weight * int(weights[later])
    return dict(vector)


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
@pytest.mark.parametrize(("weighted", "split"), [(True, False), (False, True), (True, True)])
def test_weights_and_sessions_pair_by_pair(
    engine: str, weighted: bool, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sum is the naive one, also where the pairs of a range are looked for, and every user's norm at most 1."""
    users, places = marked(), np.arange(ITEMS)
    expected: Counter[tuple[int, int]] = Counter()
    for history, weights, sessions in users:
        ones, one = np.ones(len(history), dtype=np.int64), np.zeros(len(history), dtype=np.int64)
        vector = naive(history, weights if weighted else ones, sessions if split else one)
        squares = np.array([sum(value * value for value in vector.values())])
        for pair, value in vector.items():
            expected[pair] += int(quantised(np.array([value]), squares)[0])
        assert sum(quantised(np.array([v]), squares)[0] ** 2 for v in vector.values()) <= GRID**2
    every = np.arange(ITEMS * (ITEMS - 1) // 2)
    arrays = with_marks(users, weighted=weighted, split=split)
    with duckdb_sums(*arrays) if engine == "duckdb" else nullcontext(ArraySums(*arrays)) as sums:
        directed = sums.pairs(places, every, True).reshape(-1, 2)
        for high in range(ITEMS):
            for low in range(high):
                cell = high * (high - 1) // 2 + low
                assert directed[cell].tolist() == [expected[low, high], expected[high, low]]
        whole = dict(zip(*(part.tolist() for part in gathered(sums.all_pairs(places))), strict=True))
        monkeypatch.setattr(sums_module, "CELLS_AT_ONCE", 5)
        monkeypatch.setattr(sums_module, "COUNTERS", 5)
        by_range = dict(zip(*(part.tolist() for part in gathered(sums.all_pairs(places))), strict=True))
        assert whole == by_range and len(whole) > 20


def test_no_weight_lets_a_user_count_for_more_than_one() -> None:
    """All of the heaviest events, or one among many: what the sums gain is of norm 1 at most."""
    places = np.arange(40)
    rng = np.random.default_rng(2)
    for weights in (np.full(3000, MOST_WEIGHT), np.r_[np.ones(2999, int), MOST_WEIGHT], rng.integers(1, 101, 3000)):
        user = (rng.integers(0, 40, 3000), weights, np.cumsum(rng.random(3000) < 0.1))
        for weighted, split in ((True, False), (True, True)):
            sums = ArraySums(*with_marks([user], weighted=weighted, split=split))
            cells, q = gathered(sums.all_pairs(places))
            assert 0.99 * GRID < np.linalg.norm(q.astype(float)) <= GRID
            for directed in (False, True):
                assert np.linalg.norm(sums.pairs(places, cells, directed).astype(float)) <= GRID


def test_equal_weights_are_no_weights() -> None:
    """Only ratios matter: a vector is scaled to norm 1."""
    users = [(history, np.full(len(history), 7), sessions) for history, _, sessions in marked()]
    plain, same = (ArraySums(*with_marks(users, weighted=weighted, split=False)) for weighted in (False, True))
    for found, due in zip(
        gathered(same.all_pairs(np.arange(ITEMS))), gathered(plain.all_pairs(np.arange(ITEMS))), strict=True
    ):
        assert np.abs(found - due).max() <= len(users)  # each user's numbers are rounded down


def test_weighted_sums_leave_room_for_the_longest_history() -> None:
    assert (sum(WEIGHTS) * MOST_WEIGHT * LONGEST_WEIGHTED) ** 2 < 2**63
