"""Sums of counts by DuckDB, out of core: what exceeds its memory limit goes to disk."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dpformer.engines.duckdb_connection import Connection, connect
from dpformer.engines.sql_sums import SqlSums, history_rows

USERS_AT_ONCE = 1 << 18
ROWS_AT_ONCE = 1 << 24  # rows of a result


class DuckDB:
    """See `sql_sums.Backend`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        connection.execute("CREATE MACRO IF NOT EXISTS shiftright(x, n) AS x >> n")  # Spark's name for it

    def table(self, name: str, columns: dict[str, np.ndarray]) -> None:
        self._write(f"CREATE OR REPLACE TABLE {name} AS", columns)

    def append(self, name: str, columns: dict[str, np.ndarray]) -> None:
        self._write(f"INSERT INTO {name}", columns)

    def query(self, sql: str) -> Sequence[np.ndarray]:
        found = self.connection.execute(sql).fetchnumpy()
        return [np.asarray(values, dtype=np.int64) for values in found.values()]

    def blocks(self, sql: str) -> Iterator[Sequence[np.ndarray]]:
        self.connection.execute(f"CREATE OR REPLACE TEMP TABLE result AS {sql} ORDER BY 1")  # spills to disk
        rows = int(self.connection.execute("SELECT count(*) FROM result").fetchone()[0])
        for first in range(0, rows, ROWS_AT_ONCE):
            part = f"rowid >= {first} AND rowid < {first + ROWS_AT_ONCE}"
            yield self.query(f"SELECT * FROM result WHERE {part} ORDER BY rowid")
        self.connection.execute("DROP TABLE result")

    def spread(self, led: str, other: str, weights: dict[int, int]) -> str:
        rows = " UNION ALL ".join(f"SELECT {k} AS k, CAST({weight} AS BIGINT) AS w" for k, weight in weights.items())
        return f"SELECT u, x, {other} AS y, w FROM {led} CROSS JOIN ({rows}) AS distances WHERE x IS NOT NULL"

    def normed(self, vectors: str) -> str:
        norms = f"SELECT u, CAST(sum(v * v) AS BIGINT) AS s FROM {vectors} GROUP BY u"
        return f"SELECT c, v, s FROM {vectors} JOIN ({norms}) AS norms ON {vectors}.u = norms.u"

    def _write(self, how: str, columns: dict[str, np.ndarray]) -> None:
        given = {name: np.ascontiguousarray(values, dtype=np.int64) for name, values in columns.items()}
        self.connection.register("given", given)
        self.connection.execute(f"{how} SELECT {', '.join(columns)} FROM given")
        self.connection.unregister("given")


@contextmanager
def duckdb_sums(
    items: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    weights: np.ndarray | None = None,
    sessions: np.ndarray | None = None,
    *,
    memory: str | None = None,
) -> Iterator[SqlSums]:
    """Sums of histories in arrays, as in `ArraySums`; the database lives with the context."""
    marks = {"w": weights, "s": sessions}
    names = ["u", "p", "i", *(name for name, of in marks.items() if of is not None)]
    with connect(memory, "the table of histories") as connection:
        made = DuckDB(connection)
        connection.execute(f"CREATE TABLE histories ({', '.join(f'{name} INTEGER' for name in names)})")
        for first in range(0, len(starts), USERS_AT_ONCE):
            users = slice(first, first + USERS_AT_ONCE)
            part = history_rows(items, starts[users], stops[users], weights, sessions)
            made.append("histories", {**part, "u": part["u"] + first})
        yield SqlSums(made, len(starts), weighted=weights is not None, sessions=sessions is not None)
