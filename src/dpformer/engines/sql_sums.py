"""The sums of a round of counts as SQL that any backend runs: pairs, one user's vector, its norm, sums by cell.

It gives the same integers as `sums.ArraySums`, bit for bit: weights and squares are added as integers, and rounded
operations (√, ×, ÷) are correctly rounded by every backend with IEEE 754 arithmetic.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from dpformer.engines.sums import GRID, MOST_WEIGHT, WEIGHTS, WINDOW, Block, longest

# Quotients of integers: a literal such as 1.000000001 is a decimal in one backend and a float in another.
_SLACK = "(1000000001e0 / 1000000000e0)"
AT_ONCE = 1 << 23  # sums of a later round queried at a time
_WEIGHT_BITS = MOST_WEIGHT.bit_length()


class Backend(Protocol):
    """The interface of a backend."""

    def table(self, name: str, columns: dict[str, np.ndarray]) -> None:
        """Create or replace a table of integers."""

    def query(self, sql: str) -> Sequence[np.ndarray]:
        """The columns of a result, as int64, its rows in any order."""

    def blocks(self, sql: str) -> Iterator[Sequence[np.ndarray]]:
        """The same in blocks of rows, ordered by the first column, whose values are distinct."""

    def spread(self, led: str, other: str, weights: dict[int, int]) -> str:
        """SQL of (u, x, y, w): each row of `led` once for each k and weight w, with y the column x1, x2, …, xk of it.

        `other` is y as an expression of k, where rows have a column k."""

    def normed(self, vectors: str) -> str:
        """SQL of (c, v, s): each row (u, c, v) of the table `vectors` with s = Σ v² of its user."""


class SqlSums:
    """`Sums` of a backend's table `histories` (u, p, i): user, position from the start, item, all integers.

    For users with more than LONGEST items the table holds only the last ones. If interactions are `weighted`, there is
    a column w; if they are in `sessions`, a column s.
    """

    def __init__(self, backend: Backend, num_users: int, *, weighted: bool = False, sessions: bool = False) -> None:
        self.backend, self.num_users = backend, num_users
        self.weighted, self.owner = weighted, "u, s" if sessions else "u"
        self._placed: np.ndarray | None = None

    def items(self, num_items: int) -> np.ndarray:
        items, sums = self.backend.query(
            "WITH vectors AS (SELECT DISTINCT u, i AS c, CAST(1 AS BIGINT) AS v FROM histories), "
            f"normed AS ({self.backend.normed('vectors')}) "
            f"SELECT c, CAST(sum({_quantised('v', 's')}) AS BIGINT) AS q FROM normed GROUP BY c"
        )
        if len(items) and not 0 <= int(items.min()) <= int(items.max()) < num_items:
            raise ValueError(f"items must be in 0..{num_items - 1}, not {int(items.min())}..{int(items.max())}")
        found = np.zeros(num_items, dtype=np.int64)
        found[items] = sums
        return found

    def all_pairs(self, places: np.ndarray) -> Iterator[Block]:
        for block in self.backend.blocks(self._round(places, "SELECT u, cell AS c, w FROM pairs")):
            yield block[0], block[1]

    def pairs(self, places: np.ndarray, survivors: np.ndarray, directed: bool) -> np.ndarray:
        width = len(survivors) * (2 if directed else 1)
        found = np.zeros(width, dtype=np.int64)
        if not width:
            return found
        self.backend.table("survivors", {"cell": survivors, "place": np.arange(len(survivors))})
        place = "2 * place + back" if directed else "place"
        chosen = f"SELECT u, {place} AS c, w FROM pairs JOIN survivors ON pairs.cell = survivors.cell"
        sql = self._round(places, chosen)
        for cells, sums in [self.backend.query(sql)] if width <= AT_ONCE else self.backend.blocks(sql):
            found[cells] = sums
        return found

    def shared(self, near: np.ndarray, num_items: int) -> np.ndarray:
        found = np.zeros(2, dtype=np.int64)
        self.backend.table("near", {"cell": near})
        chosen = (
            "SELECT u, CASE WHEN near.cell IS NULL THEN 1 ELSE 0 END AS c, w "
            "FROM pairs LEFT JOIN near ON pairs.cell = near.cell"
        )
        cells, sums = self.backend.query(self._round(np.arange(num_items), chosen))
        found[cells] = sums
        return found

    def _round(self, places: np.ndarray, chosen: str) -> str:
        """SQL of (cell, sum); `chosen` gives (u, c, w) of the pairs in play."""
        if self._placed is None or not np.array_equal(self._placed, places):
            known = np.flatnonzero(places >= 0)
            self.backend.table("places", {"i": known, "x": places[known]})
            self._placed = places.copy()
        leads = ", ".join(f"lead(x, {k}) OVER w AS x{k}" for k in range(1, WINDOW + 1))
        other = "CASE k " + " ".join(f"WHEN {k} THEN x{k}" for k in range(1, WINDOW + 1)) + " END"
        spread = self.backend.spread("led", other, dict(enumerate(WEIGHTS, start=1)))
        place = "x"
        if self.weighted:  # the weight of an item travels in the last bits of its place
            place = f"x * {1 << _WEIGHT_BITS} + w AS x"
            own = f"(y - {_shifted('y')} * {1 << _WEIGHT_BITS})"
            spread = f"SELECT u, {_shifted('x')} AS x, {_shifted('y')} AS y, w * {own} AS w FROM ({spread}) AS packed"
        each = (
            "SELECT u, least(x, y) AS lo, greatest(x, y) AS hi, CASE WHEN x > y THEN 1 ELSE 0 END AS back, w FROM "
            f"({spread}) AS xy WHERE y IS NOT NULL AND x <> y"
        )
        return (
            f"WITH placed AS (SELECT {self.owner}, p, {place} FROM histories LEFT JOIN places "
            "ON histories.i = places.i), "
            f"led AS (SELECT u, x, {leads} FROM placed WINDOW w AS (PARTITION BY {self.owner} ORDER BY p)), "
            f"each_pair AS ({each}), "
            f"pairs AS (SELECT u, {_half('hi * (hi - 1)')} + lo AS cell, back, w FROM each_pair), "
            f"chosen AS ({chosen}), "
            "vectors AS (SELECT u, c, CAST(sum(w) AS BIGINT) AS v FROM chosen GROUP BY u, c), "
            f"normed AS ({self.backend.normed('vectors')}), "
            f"parts AS (SELECT c, {_quantised('v', 's')} AS q FROM normed) "
            "SELECT CAST(c AS BIGINT) AS c, CAST(sum(q) AS BIGINT) AS q FROM parts GROUP BY c HAVING sum(q) > 0"
        )


def _quantised(value: str, squares: str) -> str:
    scaled = f"CAST({value} AS DOUBLE) * {GRID}e0"
    return f"CAST(floor({scaled} / (sqrt(CAST({squares} AS DOUBLE)) * {_SLACK})) AS BIGINT)"


def _half(value: str) -> str:
    """Half of an even number."""
    return f"CAST(shiftright({value}, 1) AS BIGINT)"


def _shifted(packed: str) -> str:
    """The place in a packed place and weight."""
    return f"CAST(shiftright({packed}, {_WEIGHT_BITS}) AS BIGINT)"


def history_rows(
    items: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    weights: np.ndarray | None = None,
    sessions: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The table `histories` for some users: the last LONGEST items of each."""
    starts = np.maximum(starts, stops - longest(weights))
    lengths = stops - starts
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = np.repeat(starts, lengths) + within
    users: Any = np.repeat(np.arange(len(lengths)), lengths)
    columns = {"i": items, "w": weights, "s": sessions}
    marks = {name: np.asarray(of[rows], dtype=np.int64) for name, of in columns.items() if of is not None}
    return {"u": users, "p": within, **marks}
