"""A log in DuckDB: rows checked, ids numbered, everything in the order of user and time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import numpy as np

from dpformer.data.columns import Columns
from dpformer.data.readers.bad_rows import check_rows
from dpformer.data.readers.formats import relation
from dpformer.data.readers.relation import Relation
from dpformer.data.readers.split_line import OK
from dpformer.data.reading import Reading
from dpformer.engines.duckdb_connection import Connection, connect
from dpformer.errors import DpformerError
from dpformer.progress import watching

ROWS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Log:
    """A log that was read: the ids of users and items, and DuckDB's table `ordered` of (u, i, t, f).

    Its rows are by user (numbered by first appearance), then time, then place in the file. Every user whom a row names
    is in `user_ids`, whether or not any row of that user passes the filters: their number is published, so it must not
    depend on what a user did.
    """

    connection: Connection
    user_ids: list[str]
    item_ids: list[str]
    format: str
    time_column: str | None
    interactions: int  # before any filter
    skipped: dict[str, int] = field(default_factory=dict)  # what was wrong → rows left out

    def offsets(self) -> np.ndarray:
        """Where the rows of each user start and the last ends, (users + 1,); a user may have none."""
        counts = self.connection.execute("SELECT u, count(*) AS n FROM ordered GROUP BY u").fetchnumpy()
        lengths = np.zeros(len(self.user_ids), dtype=np.int64)
        lengths[np.asarray(counts["u"])] = counts["n"]
        return np.concatenate([[0], np.cumsum(lengths)])

    def parts(self, offsets: np.ndarray) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
        """The rows of some whole users at a time: (which users, their columns i, t and f)."""
        user, users = 0, len(offsets) - 1
        while user < users:
            stop = int(np.searchsorted(offsets, offsets[user] + ROWS_AT_ONCE, side="right")) - 1
            stop = min(max(stop, user + 1), users)  # one user at least
            rows = f"rowid >= {offsets[user]} AND rowid < {offsets[stop]}"
            found = self.connection.execute(f"SELECT i, t, f FROM ordered WHERE {rows} ORDER BY rowid").fetchnumpy()
            yield slice(user, stop), {column: np.asarray(values) for column, values in found.items()}
            user = stop


@contextmanager
def open_log(
    path: Path,
    columns: Columns | None = None,
    reading: Reading | None = None,
    *,
    min_rating: float | None = None,
    min_user_actions: int = 0,
) -> Iterator[Log]:
    """Reads a log into a database of its own, which lives as long as the context."""
    columns, reading = columns or Columns(), reading or Reading()
    with TemporaryDirectory(prefix="dpformer-") as folder, connect(reading.memory, str(path)) as connection:
        found = relation(connection, path, columns, reading, rating=min_rating is not None, folder=Path(folder))
        with watching(f"reading {path.name}", lambda: _share(connection)):
            _load(connection, found)
        skipped = check_rows(connection, found, path, skip=reading.skip_bad_rows)
        total = int(connection.execute(f"SELECT count(*) FROM raw WHERE fault = {OK}").fetchone()[0])
        if not total:
            raise DpformerError(f"{path} has no rows" + (" that can be read" if skipped else ""))
        _order(connection, found, min_rating, min_user_actions)
        users, items = (
            connection.execute(f"SELECT id FROM {table} ORDER BY code").fetchnumpy()["id"].tolist()
            for table in ("users", "items")
        )
        connection.execute("DROP TABLE raw; DROP TABLE users; DROP TABLE items")
        yield Log(connection, users, items, found.format, found.time_column, total, skipped)


def _load(connection: Connection, found: Relation) -> None:
    """Table `raw`; where the quick way meets an odd row, the other one, which says what is odd about it."""
    if found.quick is not None:
        try:
            connection.execute(f"CREATE TABLE raw AS {found.quick}")
            return
        except (duckdb.InvalidInputException, duckdb.ConversionException):
            connection.execute("DROP TABLE IF EXISTS raw")
    connection.execute(f"CREATE TABLE raw AS {found.sql}")


def _share(connection: Connection) -> float:
    """How much of a running query is done, as far as DuckDB can tell."""
    return max(0.0, float(connection.query_progress())) / 100


def _order(connection: Connection, found: Relation, min_rating: float | None, min_user_actions: int) -> None:
    """Table `ordered`: what the filters leave, ids as numbers, by user, time and place in the file."""
    keep = f"fault = {OK}" + (f" AND r >= {float(min_rating)!r}" if min_rating is not None else "")
    enough = f"SELECT u FROM raw WHERE {keep} GROUP BY u HAVING count(*) >= {int(min_user_actions)}"
    few = f" AND u IN ({enough})" if min_user_actions > 1 else ""
    fractions = connection.execute("SELECT max(f) > 0 FROM raw").fetchone()[0]
    by = "" if found.time_column is None else "t, f," if fractions else "t,"
    connection.execute(
        "CREATE TABLE ordered AS SELECT CAST(users.code AS INTEGER) AS u, CAST(items.code AS INTEGER) AS i, t, f "
        "FROM raw JOIN users ON raw.u = users.id JOIN items ON raw.i = items.id "
        f"WHERE {keep}{few} ORDER BY users.code, {by} raw.rowid"
    )
