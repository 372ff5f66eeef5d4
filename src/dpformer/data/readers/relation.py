"""Any log as one SQL relation of user, item, time and rating, each row with what is wrong with it."""

from dataclasses import dataclass

from dpformer.data.columns import Columns, resolve
from dpformer.data.readers.split_line import ITEM, OK, RATING, TIME, USER
from dpformer.data.reading import Reading


@dataclass(frozen=True)
class Relation:
    """A log: SQL that gives (u, i, t, f, kind, r, fault) for every row, in order."""

    sql: str
    time_column: str | None  # None: file order
    first_row: int = 1  # the number of the first row of data
    cells: str = ""  # SQL of (user, item, time, rating) as they stand there, in the same order: for sentences
    lines: str | None = None  # SQL of its lines, likewise
    quick: str | None = None  # SQL that gives the same rows in less time, or fails where a row is odd
    format: str = ""  # how it is called
    broken_field: str | None = None  # SQL that counts pairs of lines that a quoted field with line breaks could span


@dataclass(frozen=True)
class Wanted:
    """What is asked of a log, and what it is called in a sentence."""

    columns: Columns
    reading: Reading
    rating: bool
    where: str

    def resolve(self, names: list[str], order: str | None = None) -> dict[str, str]:
        return resolve(names, self.columns, rating=self.rating, order=order or self.reading.order, where=self.where)


def rows(select: str, user: str, item: str, time: tuple[str, str, str] | None, rating: str | None, fault: str) -> str:
    """SQL of (u, i, t, f, kind, r, fault): the first thing wrong with a row is what it is refused for."""
    t, f, kind = time or ("CAST(0 AS BIGINT)", "0", "0")
    inner = (
        f"SELECT {user} AS u, {item} AS i, {t} AS t, {f} AS f, {kind} AS kind, {rating or 'NULL'} AS r, "
        f"{fault} AS fault FROM ({select})"
    )
    checks = [f"WHEN fault <> {OK} THEN fault", f"WHEN u IS NULL THEN {USER}", f"WHEN i IS NULL THEN {ITEM}"]
    checks += [f"WHEN t IS NULL THEN {TIME}"] * (time is not None)
    checks += [f"WHEN r IS NULL THEN {RATING}"] * (rating is not None)
    r = ", CAST(r AS DOUBLE) AS r" if rating else ""
    return (
        f"SELECT u, i, t, CAST(f AS INTEGER) AS f, CAST(kind AS TINYINT) AS kind{r}, "
        f"CAST(CASE {' '.join(checks)} ELSE {OK} END AS TINYINT) AS fault FROM ({inner})"
    )


def shown(value: str) -> str:
    """A value as a sentence shows it."""
    return repr(value if len(value) <= 80 else value[:80] + "…")
