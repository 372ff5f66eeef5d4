"""Text, line by line: CSV, TSV, RecBole, MovieLens `::`, plain lines; with a header in the file or a declared one."""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from dpformer.data.columns import COLUMN_NAMES, listed, plain, usual
from dpformer.data.readers.formats import Format, Given
from dpformer.data.readers.parse_cell import id_of_text, rating_of, time_of_text, whole_time
from dpformer.data.readers.relation import Relation, Wanted, rows, shown
from dpformer.data.readers.split_line import FIELDS, OK, Fields, all_plain, columns, delimited, lines, separated
from dpformer.data.reading import DELIMITERS, Reading
from dpformer.data.sources.files import unpacked
from dpformer.engines.duckdb_connection import Connection, text
from dpformer.errors import DpformerError

_BLANKS = "' \t'"
_RECBOLE_FIELD = re.compile(r"(?P<name>[^:]+):(token|token_seq|float|float_seq)")
# The columns of lines without a header, by their number: the files of SASRec and MovieLens.
_POSITIONS = {
    2: ["user", "item"],
    3: ["user", "item", "timestamp"],
    4: ["user", "item", "rating", "timestamp"],
}


@dataclass(frozen=True)
class Dialect:
    """How lines are split into fields.

    Attributes:
        delimiter: separator of fields; None: the one in the header.
        header: whether the first line names the columns.
        quotes: whether fields may be quoted.
        pairs_in_order: whether lines of user and item are in order of time, as SASRec's are.
    """

    delimiter: str | None
    header: bool = True
    quotes: bool = True
    pairs_in_order: bool = False

    def read(self, given: Given) -> Relation:
        """The relation for some files."""
        files = unpacked(given.files, given.wanted.reading, given.folder)
        return text_lines(given.connection, files, self, given.wanted)


def text_lines(connection: Connection, files: list[Path], dialect: Dialect, wanted: Wanted) -> Relation:
    """Lines of fields, with a header in the file or a declared one."""
    firsts = [_first_line(connection, file, wanted.where) for file in files]
    declared = wanted.reading.header
    headed = declared is None and dialect.header
    if headed and len(set(firsts)) > 1:
        raise DpformerError(f"the files of {wanted.where} have different headers: give only files that agree")
    delimiter = _delimiter(firsts[0], dialect, wanted.reading, headed)
    if headed:
        names = _header(firsts[0], delimiter, dialect, wanted)
    elif declared is not None:
        names = declared
    else:
        names = _usual_positions(connection, firsts[0], delimiter, wanted)
    source = lines(files, 1 if headed else 0)
    if names[-1] == "items" and not headed:
        return _one_user_per_line(source, delimiter, dialect, names, wanted)
    order = "file" if dialect.pairs_in_order and declared is None and len(names) == 2 else None
    roles = wanted.resolve(names, order)
    fields = _fields(delimiter, len(names), dialect, wanted.reading)
    values = {role: fields.field(names.index(column)) for role, column in roles.items()}
    time = time_of_text("time") if "timestamp" in values else None
    inner = f"SELECT {fields.expression} AS s, line FROM {source} WHERE line IS NOT NULL AND trim(line) <> ''"
    row_filter = wanted.row_filter(names)
    more = "" if row_filter is None else row_filter.select(lambda column: _text(fields.field(names.index(column))))
    select = _cells(values, fields.fault, f"({inner})", more)
    rating = rating_of("rating") if "rating" in values else None

    def typed(select: str, time: tuple[str, str, str] | None) -> str:
        return rows(wanted, select, id_of_text("user"), id_of_text("item"), time, rating, "fault", row_filter)

    quick = None
    if dialect.header and all_plain(files, delimiter, quotes=fields.quoted):
        cells = {role: f"c{names.index(column)}" for role, column in roles.items()}
        plainly = columns(files, 1 if headed else 0, delimiter, len(names))
        more = "" if row_filter is None else row_filter.select(lambda column: _text(f"c{names.index(column)}"))
        quick = typed(_cells(cells, str(OK), plainly, more, trim=False), time and whole_time("time"))
    first_row = 2 if headed else 1
    spans = _spans(fields, source, len(names))
    sql = typed(select, time)
    return Relation(sql, roles.get("timestamp"), first_row, select, source, quick, broken_field=spans, filtered=True)


def _spans(fields: Fields, source: str, width: int) -> str | None:
    """SQL that counts pairs of lines which, joined with all lines between, could be one row of the right width."""
    if not fields.quoted:
        return None
    marked = (
        f"SELECT {fields.opened} AS opened, {fields.closed} AS closed, row_number() OVER () AS n FROM {source} "
        "WHERE contains(line, '\"')"
    )
    return (
        f"WITH marked AS MATERIALIZED ({marked}), "
        "opens AS (SELECT opened, min(n) AS n FROM marked WHERE opened IS NOT NULL GROUP BY opened), "
        "closes AS (SELECT closed, max(n) AS n FROM marked WHERE closed IS NOT NULL GROUP BY closed) "
        f"SELECT count(*) FROM opens, closes WHERE opened + closed + 1 = {width} AND opens.n < closes.n"
    )


def _text(field: str) -> str:
    """SQL of a field for a row filter: an empty one is missing."""
    return f"nullif({field}, '')"


def _cells(values: dict[str, str], fault: str, source: str, more: str, *, trim: bool = True) -> str:
    """SQL of (user, item, time, rating, fault) from SQL of each, and of `more`.

    An integer may be surrounded by blanks (`trim`).
    """
    time = values.get("timestamp", "NULL")
    time = f"trim({time}, {_BLANKS})" if trim and time != "NULL" else time
    return (
        f"SELECT {values['user']} AS user, {values['item']} AS item, {time} AS time, "
        f"{values.get('rating', 'NULL')} AS rating, {fault} AS fault{more} FROM {source}"
    )


def _one_user_per_line(source: str, delimiter: str, dialect: Dialect, names: list[str], wanted: Wanted) -> Relation:
    if names != ["user", "items"]:
        raise DpformerError(f"columns is {wanted.reading.columns!r}; one user per line is --columns user,items")
    fields = _fields(delimiter, None, dialect, wanted.reading)
    inner = f"SELECT {fields.expression} AS s, line FROM {source} WHERE line IS NOT NULL AND trim(line) <> ''"
    inner = f"SELECT s, {fields.fault} AS fault FROM ({inner})"
    items = f"CASE WHEN fault = {OK} THEN s[2:] ELSE [NULL] END"
    select = f"SELECT {fields.field(0)} AS user, fault, unnest({items}) AS item FROM ({inner})"
    item = Fields("", "", fields.quoted).field(0, "[item]")
    select = f"SELECT user, {item} AS item, NULL AS time, NULL AS rating, fault FROM ({select})"
    if wanted.rating:
        raise DpformerError("min_rating is given, but a file with one user per line has no ratings")
    sql = rows(wanted, select, id_of_text("user"), id_of_text("item"), None, None, "fault", None)
    return Relation(sql, None, 1, select)


def _first_line(connection: Connection, file: Path, where: str) -> str:
    query = f"SELECT line FROM {lines([file], 0, rejects=False)} WHERE line IS NOT NULL AND trim(line) <> '' LIMIT 1"
    row = connection.execute(query).fetchone()
    if row is None:
        raise DpformerError(f"{where} is empty" if file.stat().st_size < 2 else f"{where} has no readable lines")
    return str(row[0])


def _delimiter(first: str, dialect: Dialect, reading: Reading, headed: bool) -> str:
    if reading.delimiter is not None or dialect.delimiter is not None:
        return str(reading.delimiter or dialect.delimiter)
    return max(DELIMITERS, key=first.count) if headed else ","  # of a header, which is not user data


def _fields(delimiter: str, width: int | None, dialect: Dialect, reading: Reading) -> Fields:
    if not dialect.header:
        return separated(delimiter, width)
    if width is None:
        found = delimited(delimiter, 0, quotes=reading.quotes)
        return Fields(found.expression, f"CASE WHEN len(s) < 2 THEN {FIELDS} ELSE {OK} END", found.quoted)
    return delimited(delimiter, width, quotes=reading.quotes and dialect.quotes)


def _header(first: str, delimiter: str, dialect: Dialect, wanted: Wanted) -> list[str]:
    bare = not (dialect.quotes and wanted.reading.quotes)
    fields = first.split(delimiter) if bare else next(csv.reader([first], delimiter=delimiter))
    names = [field.strip() for field in fields]
    typed = [_RECBOLE_FIELD.fullmatch(field) for field in names]
    if all(typed):
        names = [match["name"] for match in typed if match]
    chosen = {wanted.columns.user, wanted.columns.item}
    if not (chosen & set(names)) and usual(names, "user") is None and usual(names, "item") is None:
        raise DpformerError(
            f"{wanted.where} has no header with user_id and item_id (its first row is {shown(first)}); give the "
            "columns with --user-column and --item-column, or supply a header: --columns user,item,timestamp"
        )
    return names


def _usual_positions(connection: Connection, first: str, delimiter: str, wanted: Wanted) -> list[str]:
    """By the number of fields in the first line; every other line must have the same number."""
    fields = separated(delimiter, None).expression
    found = connection.execute(f"SELECT {fields} FROM (SELECT {text(first)} AS line)").fetchone()[0]
    known = {known for role in ("user", "item") for known in COLUMN_NAMES[role]}
    if any(plain(field) in known for field in found):
        raise DpformerError(
            f"{wanted.where} seems to have a header ({listed(found)}): give --format tsv, or csv and --delimiter"
        )
    if wanted.reading.skip_bad_rows:
        raise DpformerError(
            f"{wanted.where} has no header, so its first row would determine which rows are invalid: supply a header, "
            "such as --columns user,item,timestamp"
        )
    if len(found) not in _POSITIONS:
        raise DpformerError(
            f"{wanted.where} has {len(found)} fields in its first row ({shown(first)}) and no header: supply a header, "
            "such as --columns user,item,timestamp, or --columns user,items for lines with one user and all items"
        )
    return _POSITIONS[len(found)]


FORMATS = (
    Format("csv", "CSV", (".csv",), Dialect(None).read),
    Format("tsv", "TSV", (".tsv", ".tab"), Dialect("\t").read),
    Format("inter", "RecBole", (".inter",), Dialect("\t", quotes=False).read),
    Format("movielens", "MovieLens ::", (".dat",), Dialect("::", header=False).read),
    Format("lines", "plain lines", (".txt", ".data"), Dialect(" ", header=False, pairs_in_order=True).read),
)
