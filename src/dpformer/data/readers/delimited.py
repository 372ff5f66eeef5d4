"""Text, line by line: CSV, TSV, RecBole, MovieLens `::`, plain lines; with a header, or with one that was declared."""

import csv
import re
from pathlib import Path

from dpformer.data.columns import COLUMN_NAMES, listed, plain, usual
from dpformer.data.readers.parse_cell import id_of_text, rating_of, time_of_text, whole_time
from dpformer.data.readers.relation import Relation, Wanted, rows, shown
from dpformer.data.readers.split_line import FIELDS, OK, Fields, all_plain, columns, delimited, lines, separated
from dpformer.data.reading import DELIMITERS, FORMATS, Reading
from dpformer.engines.duckdb_connection import Connection, text
from dpformer.errors import DpformerError

_BLANKS = "' \t'"
_RECBOLE_FIELD = re.compile(r"(?P<name>[^:]+):(token|token_seq|float|float_seq)")
# What lines without a header mean, by their number of fields: SASRec's and MovieLens' own files.
_POSITIONS = {
    2: ["user", "item"],
    3: ["user", "item", "timestamp"],
    4: ["user", "item", "rating", "timestamp"],
}


def text_lines(connection: Connection, files: list[Path], kind: str, wanted: Wanted) -> Relation:
    """Lines of fields, with a header or with one that was declared."""
    firsts = [_first_line(connection, file, wanted.where) for file in files]
    declared = wanted.reading.header
    headed = declared is None and kind in ("csv", "tsv", "inter")
    if headed and len(set(firsts)) > 1:
        raise DpformerError(f"the files of {wanted.where} have different headers: give those alone that agree")
    delimiter = _delimiter(firsts[0], kind, wanted.reading, headed)
    if headed:
        names = _header(firsts[0], delimiter, kind, wanted)
    elif declared is not None:
        names = declared
    else:
        names = _usual_positions(connection, firsts[0], delimiter, wanted)
    source = lines(files, 1 if headed else 0)
    if names[-1] == "items" and not headed:
        return _one_user_a_line(source, delimiter, kind, names, wanted)
    order = "file" if kind == "lines" and declared is None and len(names) == 2 else None  # SASRec's: in order of time
    roles = wanted.resolve(names, order)
    fields = _fields(delimiter, len(names), kind, wanted.reading)
    values = {role: fields.field(names.index(column)) for role, column in roles.items()}
    time = time_of_text("time") if "timestamp" in values else None
    inner = f"SELECT {fields.expression} AS s, line FROM {source} WHERE line IS NOT NULL AND trim(line) <> ''"
    select = _cells(values, fields.fault, f"({inner})")
    rating = rating_of("rating") if "rating" in values else None

    def typed(select: str, time: tuple[str, str, str] | None) -> str:
        return rows(select, id_of_text("user"), id_of_text("item"), time, rating, "fault")

    quick = None
    if kind in ("csv", "tsv", "inter") and all_plain(files, delimiter, quotes=fields.quoted):
        cells = {role: f"c{names.index(column)}" for role, column in roles.items()}
        plainly = columns(files, 1 if headed else 0, delimiter, len(names))
        quick = typed(_cells(cells, str(OK), plainly, trim=False), time and whole_time("time"))
    first_row = 2 if headed else 1
    spans = _spans(fields, source, len(names))
    return Relation(typed(select, time), FORMATS[kind], roles.get("timestamp"), first_row, select, source, quick, spans)


def _spans(fields: Fields, source: str, width: int) -> str | None:
    """SQL that counts pairs of lines which, with all between them, could be one row of the right number of fields."""
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


def _cells(values: dict[str, str], fault: str, source: str, *, trim: bool = True) -> str:
    """SQL of (user, item, time, rating, fault) from SQL of each; a whole number may have blanks around it (`trim`)."""
    time = values.get("timestamp", "NULL")
    time = f"trim({time}, {_BLANKS})" if trim and time != "NULL" else time
    return (
        f"SELECT {values['user']} AS user, {values['item']} AS item, {time} AS time, "
        f"{values.get('rating', 'NULL')} AS rating, {fault} AS fault FROM {source}"
    )


def _one_user_a_line(source: str, delimiter: str, kind: str, names: list[str], wanted: Wanted) -> Relation:
    if names != ["user", "items"]:
        raise DpformerError(f"columns is {wanted.reading.columns!r}; one user a line is --columns user,items")
    fields = _fields(delimiter, None, kind, wanted.reading)
    inner = f"SELECT {fields.expression} AS s, line FROM {source} WHERE line IS NOT NULL AND trim(line) <> ''"
    inner = f"SELECT s, {fields.fault} AS fault FROM ({inner})"
    items = f"CASE WHEN fault = {OK} THEN s[2:] ELSE [NULL] END"
    select = f"SELECT {fields.field(0)} AS user, fault, unnest({items}) AS item FROM ({inner})"
    item = Fields("", "", fields.quoted).field(0, "[item]")
    select = f"SELECT user, {item} AS item, NULL AS time, NULL AS rating, fault FROM ({select})"
    if wanted.rating:
        raise DpformerError("min_rating is given, and a file of one user a line has no ratings")
    sql = rows(select, id_of_text("user"), id_of_text("item"), None, None, "fault")
    return Relation(sql, FORMATS[kind], None, 1, select)


def _first_line(connection: Connection, file: Path, where: str) -> str:
    query = f"SELECT line FROM {lines([file], 0, rejects=False)} WHERE line IS NOT NULL AND trim(line) <> '' LIMIT 1"
    row = connection.execute(query).fetchone()
    if row is None:
        raise DpformerError(f"{where} is empty" if file.stat().st_size < 2 else f"{where} has no readable line")
    return str(row[0])


def _delimiter(first: str, kind: str, reading: Reading, headed: bool) -> str:
    if kind in ("movielens", "lines"):
        return reading.delimiter or {"movielens": "::", "lines": " "}[kind]
    if reading.delimiter is not None:
        return reading.delimiter
    if kind in ("tsv", "inter"):
        return "\t"
    return max(DELIMITERS, key=first.count) if headed else ","  # of a header, which no user wrote


def _fields(delimiter: str, width: int | None, kind: str, reading: Reading) -> Fields:
    if kind in ("movielens", "lines"):
        return separated(delimiter, width)
    if width is None:
        found = delimited(delimiter, 0, quotes=reading.quotes)
        return Fields(found.expression, f"CASE WHEN len(s) < 2 THEN {FIELDS} ELSE {OK} END", found.quoted)
    return delimited(delimiter, width, quotes=reading.quotes and kind != "inter")  # RecBole writes its fields bare


def _header(first: str, delimiter: str, kind: str, wanted: Wanted) -> list[str]:
    bare = kind == "inter" or not wanted.reading.quotes
    fields = first.split(delimiter) if bare else next(csv.reader([first], delimiter=delimiter))
    names = [field.strip() for field in fields]
    typed = [_RECBOLE_FIELD.fullmatch(field) for field in names]
    if all(typed):
        names = [match["name"] for match in typed if match]
    chosen = {wanted.columns.user, wanted.columns.item}
    if not (chosen & set(names)) and usual(names, "user") is None and usual(names, "item") is None:
        raise DpformerError(
            f"{wanted.where} has no header with user_id and item_id (its first row is {shown(first)}); name the "
            "columns with --user-column and --item-column, or give the header that it lacks: --columns "
            "user,item,timestamp"
        )
    return names


def _usual_positions(connection: Connection, first: str, delimiter: str, wanted: Wanted) -> list[str]:
    """By the number of fields in the first line; every other line must have as many."""
    fields = separated(delimiter, None).expression
    found = connection.execute(f"SELECT {fields} FROM (SELECT {text(first)} AS line)").fetchone()[0]
    known = {known for role in ("user", "item") for known in COLUMN_NAMES[role]}
    if any(plain(field) in known for field in found):
        raise DpformerError(
            f"{wanted.where} seems to have a header ({listed(found)}): say so with --format tsv, or csv and --delimiter"
        )
    if wanted.reading.skip_bad_rows:
        raise DpformerError(
            f"{wanted.where} has no header, so that its first row would say which rows are bad: give the header that "
            "it lacks, such as --columns user,item,timestamp"
        )
    if len(found) not in _POSITIONS:
        raise DpformerError(
            f"{wanted.where} has {len(found)} fields in its first row ({shown(first)}) and no header: give the header "
            "that it lacks, such as --columns user,item,timestamp, or --columns user,items where a line is one "
            "user with all items"
        )
    return _POSITIONS[len(found)]
