"""Sums of counts by DuckDB, out of core: what exceeds its memory limit goes to disk.

It gives the same integers as `sums.ArraySums`, bit for bit: weights and squares are added as integers, and rounded
operations (√, ×, ÷) are correctly rounded by everything with IEEE 754 arithmetic.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpformer.engines.duckdb_connection import Connection, connect
from dpformer.engines.sums import GRID, MOST_WEIGHT, WEIGHTS, WINDOW, Block, longest

USERS_AT_ONCE = 1 << 18
ROWS_AT_ONCE = 1 << 24  # rows of a result
SUMS_AT_ONCE = 1 << 23  # sums of a later round queried at a time
_WEIGHT_BITS = MOST_WEIGHT.bit_length()
_SLACK = "(1000000001e0 / 1000000000e0)"  # a literal 1.000000001 would be a decimal
_NORMED = (  # (c, v, s): each row (u, c, v) of vectors with s = Σ v² of its user
    "norms AS (SELECT u, CAST(sum(v * v) AS BIGINT) AS s FROM vectors GROUP BY u), "
    "normed AS (SELECT c, v, s FROM vectors JOIN norms ON vectors.u = norms.u)"
)


class DuckDBSums:
    """`Sums` of a table `histories` (u, p, i): user, position from the start, item.

    For users with more than LONGEST items the table holds only the last ones. If interactions are `weighted`, there is
    a column w; if they are in `sessions`, a column s.
    """

    def __init__(self, connection: Connection, num_users: int, *, weighted: bool, sessions: bool) -> None:
        self.connection, self.num_users = connection, num_users
        self.weighted, self.owner = weighted, "u, s" if sessions else "u"
        self._placed: np.ndarray | None = None

    def items(self, num_items: int) -> np.ndarray:
        items, sums = self._query(
            "WITH vectors AS (SELECT DISTINCT u, i AS c, CAST(1 AS BIGINT) AS v FROM histories), "
            f"{_NORMED} "
            f"SELECT c, CAST(sum({_quantised('v', 's')}) AS BIGINT) AS q FROM normed GROUP BY c"
        )
        if len(items) and not 0 <= int(items.min()) <= int(items.max()) < num_items:
            raise ValueError(f"items must be in 0..{num_items - 1}, not {int(items.min())}..{int(items.max())}")
        found = np.zeros(num_items, dtype=np.int64)
        found[items] = sums
        return found

    def all_pairs(self, places: np.ndarray) -> Iterator[Block]:
        for block in self._blocks(self._round(places, "SELECT u, cell AS c, w FROM pairs")):
            yield block[0], block[1]

    def pairs(self, places: np.ndarray, survivors: np.ndarray, directed: bool) -> np.ndarray:
        width = len(survivors) * (2 if directed else 1)
        found = np.zeros(width, dtype=np.int64)
        if not width:
            return found
        self._table("survivors", {"cell": survivors, "place": np.arange(len(survivors))})
        place = "2 * place + back" if directed else "place"
        chosen = f"SELECT u, {place} AS c, w FROM pairs JOIN survivors ON pairs.cell = survivors.cell"
        sql = self._round(places, chosen)
        for cells, sums in [self._query(sql)] if width <= SUMS_AT_ONCE else self._blocks(sql):
            found[cells] = sums
        return found

    def shared(self, near: np.ndarray, num_items: int) -> np.ndarray:
        found = np.zeros(2, dtype=np.int64)
        self._table("near", {"cell": near})
        chosen = (
            "SELECT u, CASE WHEN near.cell IS NULL THEN 1 ELSE 0 END AS c, w "
            "FROM pairs LEFT JOIN near ON pairs.cell = near.cell"
        )
        cells, sums = self._query(self._round(np.arange(num_items), chosen))
        found[cells] = sums
        return found

    def _round(self, places: np.ndarray, chosen: str) -> str:
        """SQL of (cell, sum); `chosen` gives (u, c, w) of the pairs in play."""
        if self._placed is None or not np.array_equal(self._placed, places):
            known = np.flatnonzero(places >= 0)
            self._table("places", {"i": known, "x": places[known]})
            self._placed = places.copy()
        leads = ", ".join(f"lead(x, {k}) OVER w AS x{k}" for k in range(1, WINDOW + 1))
        other = "CASE k " + " ".join(f"WHEN {k} THEN x{k}" for k in range(1, WINDOW + 1)) + " END"
        distances = " UNION ALL ".join(
            f"SELECT {k} AS k, CAST({weight} AS BIGINT) AS w" for k, weight in enumerate(WEIGHTS, start=1)
        )
        spread = f"SELECT u, x, {other} AS y, w FROM led CROSS JOIN ({distances}) AS distances WHERE x IS NOT NULL"
        place = "x"
        if self.weighted:  # the weight of an item travels in the last bits of its place
            place = f"x * {1 << _WEIGHT_BITS} + w AS x"
            first, second = (f"{name} >> {_WEIGHT_BITS} AS {name}" for name in "xy")
            own = f"(y & {(1 << _WEIGHT_BITS) - 1})"
            spread = f"SELECT u, {first}, {second}, w * {own} AS w FROM ({spread}) AS packed"
        each = (
            "SELECT u, least(x, y) AS lo, greatest(x, y) AS hi, CASE WHEN x > y THEN 1 ELSE 0 END AS back, w FROM "
            f"({spread}) AS xy WHERE y IS NOT NULL AND x <> y"
        )
        return (
            f"WITH placed AS (SELECT {self.owner}, p, {place} FROM histories LEFT JOIN places "
            "ON histories.i = places.i), "
            f"led AS (SELECT u, x, {leads} FROM placed WINDOW w AS (PARTITION BY {self.owner} ORDER BY p)), "
            f"each_pair AS ({each}), "
            f"pairs AS (SELECT u, ((hi * (hi - 1)) >> 1) + lo AS cell, back, w FROM each_pair), "
            f"chosen AS ({chosen}), "
            "vectors AS (SELECT u, c, CAST(sum(w) AS BIGINT) AS v FROM chosen GROUP BY u, c), "
            f"{_NORMED}, "
            f"parts AS (SELECT c, {_quantised('v', 's')} AS q FROM normed) "
            "SELECT CAST(c AS BIGINT) AS c, CAST(sum(q) AS BIGINT) AS q FROM parts GROUP BY c HAVING sum(q) > 0"
        )

    def _table(self, name: str, columns: dict[str, np.ndarray]) -> None:
        self.write(f"CREATE OR REPLACE TABLE {name} AS", columns)

    def write(self, how: str, columns: dict[str, np.ndarray]) -> None:
        """Create, or add to, a table of integers."""
        given = {name: np.ascontiguousarray(values, dtype=np.int64) for name, values in columns.items()}
        self.connection.register("given", given)
        self.connection.execute(f"{how} SELECT {', '.join(columns)} FROM given")
        self.connection.unregister("given")

    def _query(self, sql: str) -> Sequence[np.ndarray]:
        found = self.connection.execute(sql).fetchnumpy()
        return [np.asarray(values, dtype=np.int64) for values in found.values()]

    def _blocks(self, sql: str) -> Iterator[Sequence[np.ndarray]]:
        """The columns of a result in blocks of rows, ordered by the first one, whose values are distinct."""
        self.connection.execute(f"CREATE OR REPLACE TEMP TABLE result AS {sql} ORDER BY 1")  # spills to disk
        rows = int(self.connection.execute("SELECT count(*) FROM result").fetchone()[0])
        for first in range(0, rows, ROWS_AT_ONCE):
            part = f"rowid >= {first} AND rowid < {first + ROWS_AT_ONCE}"
            yield self._query(f"SELECT * FROM result WHERE {part} ORDER BY rowid")
        self.connection.execute("DROP TABLE result")


@contextmanager
def duckdb_sums(
    items: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    weights: np.ndarray | None = None,
    sessions: np.ndarray | None = None,
    *,
    memory: str | None = None,
) -> Iterator[DuckDBSums]:
    """Sums of histories in arrays, as in `ArraySums`; the database lives with the context."""
    marks = {"w": weights, "s": sessions}
    names = ["u", "p", "i", *(name for name, of in marks.items() if of is not None)]
    with connect(memory, "the table of histories") as connection:
        sums = DuckDBSums(connection, len(starts), weighted=weights is not None, sessions=sessions is not None)
        connection.execute(f"CREATE TABLE histories ({', '.join(f'{name} INTEGER' for name in names)})")
        for first in range(0, len(starts), USERS_AT_ONCE):
            users = slice(first, first + USERS_AT_ONCE)
            part = _history_rows(items, starts[users], stops[users], weights, sessions)
            sums.write("INSERT INTO histories", {**part, "u": part["u"] + first})
        yield sums


def _quantised(value: str, squares: str) -> str:
    scaled = f"CAST({value} AS DOUBLE) * {GRID}e0"
    return f"CAST(floor({scaled} / (sqrt(CAST({squares} AS DOUBLE)) * {_SLACK})) AS BIGINT)"


def _history_rows(
    items: np.ndarray, starts: np.ndarray, stops: np.ndarray, weights: np.ndarray | None, sessions: np.ndarray | None
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
