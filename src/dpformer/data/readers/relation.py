"""Any log as one SQL relation of user, item, time, rating and weight, each row with its fault, if any."""

from dataclasses import dataclass

from dpformer.data.columns import Columns, resolve
from dpformer.data.filters import Filters
from dpformer.data.readers.parse_cell import DATE
from dpformer.data.readers.split_line import EVENT, FILTERED, ITEM, OK, RATING, TIME, USER
from dpformer.data.reading import Reading
from dpformer.data.row_filter import RowFilter


@dataclass(frozen=True)
class Relation:
    """A log: SQL that gives (u, i, t, f, kind, r, e, fault) for every row, in order; r and e only if needed."""

    sql: str
    time_column: str | None  # None: file order
    first_row: int = 1  # the number of the first row of data
    cells: str = ""  # SQL of the raw (user, item, time, rating), in the same order, for error messages
    lines: str | None = None  # SQL of the raw lines, likewise
    quick: str | None = None  # faster SQL for the same rows, which fails if a row is invalid
    format: str = ""  # title of the format
    broken_field: str | None = None  # SQL that counts pairs of lines that a quoted field with line breaks could span
    snapshot: str | None = None  # version of a table
    filtered: bool = False  # whether a requested row filter has been applied
    event: str | None = None  # the raw event among `cells`, if rows have weights


@dataclass(frozen=True)
class Wanted:
    """The requested columns and filters, and the name of the log in messages."""

    columns: Columns
    reading: Reading
    filters: Filters
    where: str

    @property
    def rating(self) -> bool:
        """Whether the ratings are needed."""
        return self.filters.min_rating is not None

    def row_filter(self, names: list[str] | None) -> RowFilter | None:
        """The condition on rows, with the log's column names; None: any name is possible."""
        found = self.filters.row_filter
        return found if found is None or names is None else found.on(names, self.where)

    def resolve(self, names: list[str], order: str | None = None) -> dict[str, str]:
        return resolve(names, self.columns, rating=self.rating, order=order or self.reading.order, where=self.where)


def rows(
    wanted: Wanted,
    select: str,
    user: str,
    item: str,
    time: tuple[str, str, str] | None,
    rating: str | None,
    fault: str,
    row_filter: RowFilter | None,
) -> str:
    """SQL of (u, i, t, f, kind, r, e, fault), where fault is the first problem of a row.

    A row that a filter drops needs no item, time or rating; if it names a user, that user still counts.

    Args:
        wanted: whose filters are applied.
        select: SQL of the cells, and of the columns of the row filter.
        user: SQL of the id, over the columns of `select`; so are `item`, `time` (t, f, kind), `rating` and `fault`.
        item: NULL: there is none.
        time: None: not needed.
        rating: None: not needed.
        fault: fault of the row found before its cells were parsed.
        row_filter: with the names of this log's columns.
    """
    t, f, kind = time or ("CAST(0 AS BIGINT)", "0", "0")
    passes = "true" if row_filter is None else f"CASE WHEN {fault} = {OK} THEN coalesce({row_filter.sql}, false) END"
    weight = "" if row_filter is None or row_filter.weight is None else f", {row_filter.weight} AS e"
    inner = (
        f"SELECT {user} AS u, {item} AS i, {t} AS t, {f} AS f, {kind} AS kind, {rating or 'NULL'} AS r, "
        f"{fault} AS fault, {passes} AS passes{weight} FROM ({select})"
    )
    checks = [f"WHEN fault <> {OK} THEN fault"]
    checks += [f"WHEN NOT passes THEN {FILTERED}"] * (row_filter is not None)
    checks += [f"WHEN u IS NULL THEN {USER}", f"WHEN i IS NULL THEN {ITEM}"]
    checks += [f"WHEN t IS NULL THEN {TIME}"] * (time is not None)
    window = wanted.filters.window
    checks += [f"WHEN NOT ({window.sql(f'kind = {DATE}')}) THEN {FILTERED}"] if window and time is not None else []
    checks += [f"WHEN r IS NULL THEN {RATING}"] * (rating is not None)
    checks += [f"WHEN e IS NULL THEN {EVENT}"] * bool(weight)
    r = (", CAST(r AS DOUBLE) AS r" if rating else "") + ", e" * bool(weight)
    return (
        f"SELECT u, i, t, CAST(f AS INTEGER) AS f, CAST(kind AS TINYINT) AS kind{r}, "
        f"CAST(CASE {' '.join(checks)} ELSE {OK} END AS TINYINT) AS fault FROM ({inner})"
    )


def shown(value: str) -> str:
    """A value as shown in a message."""
    return repr(value if len(value) <= 80 else value[:80] + "…")
