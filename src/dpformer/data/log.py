"""A log in DuckDB: rows validated, ids numbered, everything sorted by user and time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import numpy as np

from dpformer.data.columns import Columns
from dpformer.data.filters import Filters
from dpformer.data.readers.bad_rows import check_first_rows, check_rows
from dpformer.data.readers.formats import relation
from dpformer.data.readers.parse_cell import DATE
from dpformer.data.readers.relation import Relation
from dpformer.data.readers.split_line import FILTERED, OK
from dpformer.data.reading import Reading
from dpformer.data.sources.urls import called
from dpformer.data.time_window import Bound, Window, pause
from dpformer.engines.duckdb_connection import Connection, connect, first_line
from dpformer.errors import DpformerError
from dpformer.progress import watching

ROWS_AT_ONCE = 1 << 22
MARKS: dict[str, type] = {"weights": np.uint8, "sessions": np.int32}  # columns of `ordered` that only some logs have


@dataclass(frozen=True)
class Log:
    """A log that has been read: the ids of users and items, and DuckDB's table `ordered` of (u, i, t, f).

    Its rows are sorted by user (numbered by first appearance), time, and position in the file. Every user named by a
    row is in `user_ids`, whether or not any row of that user passes the filters: the number of users is published, so
    it must not depend on users' actions.
    """

    connection: Connection
    user_ids: list[str]
    item_ids: list[str]
    format: str
    time_column: str | None
    interactions: int  # before any filter
    different_items: int  # in them
    skipped: dict[str, int] = field(default_factory=dict)  # reason → number of rows skipped
    snapshot: str | None = None  # version of a table with numbered versions
    marks: tuple[str, ...] = ()  # which of MARKS there are

    def offsets(self) -> np.ndarray:
        """Where the rows of each user start and the last ones end, (users + 1,); a user may have none."""
        counts = self.connection.execute("SELECT u, count(*) AS n FROM ordered GROUP BY u").fetchnumpy()
        lengths = np.zeros(len(self.user_ids), dtype=np.int64)
        lengths[np.asarray(counts["u"])] = counts["n"]
        return np.concatenate([[0], np.cumsum(lengths)])

    def cuts(self, offsets: np.ndarray) -> np.ndarray:
        """The number of rows of each user before the first one that is not before the cut, (users,)."""
        found = self.connection.execute("SELECT u, min(rowid) AS r FROM ordered WHERE later GROUP BY u").fetchnumpy()
        cuts = np.diff(offsets)
        users = np.asarray(found["u"])
        cuts[users] = np.asarray(found["r"]) - offsets[users]
        return np.asarray(cuts)

    def parts(self, offsets: np.ndarray) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
        """The rows of blocks of whole users: (which users, their columns i, t, f and `marks`)."""
        user, users = 0, len(offsets) - 1
        while user < users:
            stop = int(np.searchsorted(offsets, offsets[user] + ROWS_AT_ONCE, side="right")) - 1
            stop = min(max(stop, user + 1), users)  # at least one user
            rows = f"rowid >= {offsets[user]} AND rowid < {offsets[stop]}"
            selected = ", ".join(("i", "t", "f", *self.marks))
            query = f"SELECT {selected} FROM ordered WHERE {rows} ORDER BY rowid"
            found = self.connection.execute(query).fetchnumpy()
            yield slice(user, stop), {column: np.asarray(values) for column, values in found.items()}
            user = stop


@contextmanager
def open_log(
    path: Path,
    columns: Columns | None = None,
    reading: Reading | None = None,
    filters: Filters | None = None,
    split_at: str | None = None,
) -> Iterator[Log]:
    """Read a log into a private database that lives as long as the context.

    `split_at` is the cut of a split by time (`Log.cuts`).
    """
    cut = None if split_at is None else Bound.parse(split_at, "until")
    columns, reading, filters = columns or Columns(), reading or Reading(), filters or Filters()
    where = called(path)
    with TemporaryDirectory(prefix="dpformer-") as folder, connect(reading.memory, where) as connection:
        found = relation(connection, path, columns, reading, filters, folder=Path(folder))
        if not reading.skip_bad_rows:
            check_first_rows(connection, found, where)
        with watching(f"reading {path.name}", lambda: _share(connection)):
            _load(connection, found, filters)
        skipped = check_rows(connection, found, where, skip=reading.skip_bad_rows)
        total, different = _read(connection)
        if not total:
            raise DpformerError(f"{where} has no rows" + (" readable" if skipped else ""))
        if cut is not None and found.time_column is None:
            raise DpformerError(f"a split by time needs times, but the rows of {where} are read in file order")
        for name, bound in (("since", filters.since), ("until", split_at or filters.until)):
            if bound and not Bound.parse(bound, name).is_date:
                _refuse_dates(connection, where, f"--{name} is {bound!r}")
        marks = _order(connection, found, filters, cut)
        users, items = (
            connection.execute(f"SELECT id FROM {table} ORDER BY code").fetchnumpy()["id"].tolist()
            for table in ("users", "items")
        )
        connection.execute("DROP TABLE raw; DROP TABLE users; DROP TABLE items")
        yield Log(
            connection, users, items, found.format, found.time_column, total, different, skipped, found.snapshot, marks
        )


def refuse_early(path: Path, columns: Columns, reading: Reading, filters: Filters) -> None:
    """Refuse a log for its header or its first rows."""
    with TemporaryDirectory(prefix="dpformer-") as folder, connect(reading.memory, called(path)) as connection:
        found = relation(connection, path, columns, reading, filters, folder=Path(folder))
        if not reading.skip_bad_rows:
            check_first_rows(connection, found, called(path))


def _load(connection: Connection, found: Relation, filters: Filters) -> None:
    """Create table `raw`; if the fast query meets an invalid row, the slow one, which says what is wrong."""
    if found.quick is not None:
        try:
            connection.execute(f"CREATE TABLE raw AS {found.quick}")
            return
        except (duckdb.InvalidInputException, duckdb.ConversionException, duckdb.BinderException):
            connection.execute("DROP TABLE IF EXISTS raw")
    try:
        connection.execute(f"CREATE TABLE raw AS {found.sql}")
    except (duckdb.BinderException, duckdb.ConversionException) as error:
        if not filters.where:
            raise
        raise DpformerError(
            f"--where {filters.where!r} cannot be applied: {first_line(error)}; compare a text column (in CSV and JSON "
            "lines all columns are text) with numbers as TRY_CAST(price AS DOUBLE) > 5, where anything else counts as "
            "missing"
        ) from None


def _read(connection: Connection) -> tuple[int, int]:
    """(interactions, distinct items in them) before any filter."""
    query = f"SELECT count(*), count(DISTINCT i) FILTER (fault = {FILTERED}) FROM raw WHERE fault IN ({OK}, {FILTERED})"
    total, filtered = connection.execute(query).fetchone()
    if filtered:
        query = f"SELECT count(DISTINCT i) FROM raw WHERE fault IN ({OK}, {FILTERED})"
    else:
        query = "SELECT count(*) FROM items"
    return int(total), int(connection.execute(query).fetchone()[0])


def _refuse_dates(connection: Connection, where: str, given: str) -> None:
    """Refuse a number as a bound if the times are dates."""
    query = f"SELECT count(*) FROM raw WHERE fault IN ({OK}, {FILTERED}) AND kind = {DATE}"
    if connection.execute(query).fetchone()[0]:
        raise DpformerError(f"{given}, but the times of {where} are dates: give a date (2024-01-31)")


def _share(connection: Connection) -> float:
    """The finished share of a running query, as estimated by DuckDB."""
    return max(0.0, float(connection.query_progress())) / 100


def _order(connection: Connection, found: Relation, filters: Filters, cut: Bound | None) -> tuple[str, ...]:
    """Create table `ordered`: the filtered rows with numbered ids, by user, time and position in the file.

    Returns: which of MARKS it has.
    """
    keep = f"fault = {OK}" + (f" AND r >= {float(filters.min_rating)!r}" if filters.min_rating is not None else "")
    enough = f"SELECT u FROM raw WHERE {keep} GROUP BY u HAVING count(*) >= {int(filters.min_user_actions)}"
    few = f" AND u IN ({enough})" if filters.min_user_actions > 1 else ""
    fractions = connection.execute("SELECT max(f) > 0 FROM raw").fetchone()[0]
    by = "" if found.time_column is None else "t, f," if fractions else "t,"
    later = "" if cut is None else f", NOT ({Window(until=cut).sql(f'kind = {DATE}')}) AS later"
    weights = "" if filters.weights is None else ", e AS weights"
    sessions = ""  # 1 for a row that starts another session than the row before
    if filters.gap is not None:
        order = f"PARTITION BY users.code ORDER BY {by} raw.rowid"
        sessions = f", {pause(filters.gap, f'kind = {DATE}', order)} AS sessions"
    connection.execute(
        "CREATE TABLE ordered AS SELECT CAST(users.code AS INTEGER) AS u, CAST(items.code AS INTEGER) AS i, t, f"
        f"{later}{weights}{sessions} FROM raw JOIN users ON raw.u = users.id JOIN items ON raw.i = items.id "
        f"WHERE {keep}{few} ORDER BY users.code, {by} raw.rowid"
    )
    return tuple(name for name, there in zip(MARKS, (weights, sessions), strict=True) if there)
