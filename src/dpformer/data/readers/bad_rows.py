"""Invalid rows: refused with one sentence on the first one, its row number and the fix; or skipped and counted.

Whether a row is invalid depends on that row alone, so skipping it does not affect other users' rows.
"""

import duckdb

from dpformer.data.readers.relation import Relation, shown
from dpformer.data.readers.split_line import (
    EVENT,
    FIELDS,
    FILTERED,
    ITEM,
    JSON,
    OK,
    QUOTE,
    RATING,
    TIME,
    TWICE,
    UNREADABLE,
    USER,
)
from dpformer.engines.duckdb_connection import Connection
from dpformer.errors import DpformerError

ENCODING = "not UTF-8, or too long"
WORDS = {
    FIELDS: "wrong number of fields",
    QUOTE: "unclosed quote",
    JSON: "not a JSON object",
    TWICE: "duplicate key",
    USER: "no user",
    ITEM: "no item",
    TIME: "no time",
    RATING: "no rating",
    EVENT: "event without a weight",
}
FIRST = 10_000
_SKIP = "or skip such rows with --skip-bad-rows"


def check_first_rows(connection: Connection, found: Relation, where: str) -> None:
    """Refuse a log for an invalid row among the first ones, before all of it is read."""
    first = f"SELECT row_number() OVER () - 1 AS n, fault FROM (SELECT fault FROM ({found.sql}) LIMIT {FIRST})"
    query = f"SELECT n, fault FROM first_rows WHERE fault NOT IN ({OK}, {FILTERED}) ORDER BY n LIMIT 1"
    try:
        connection.execute(f"CREATE OR REPLACE TEMP TABLE first_rows AS {first}")
        bad = connection.execute(query).fetchone()
    except duckdb.Error:
        return  # reading all of it says what is wrong
    _rejected(connection, where, skip=False)
    if bad is not None and bad[1] != QUOTE:  # which lines a quote spans depends on the lines after it
        _refuse(connection, found, where, int(bad[1]), int(bad[0]))


def check_rows(connection: Connection, found: Relation, where: str, *, skip: bool) -> dict[str, int]:
    """Check table `raw`, and create the tables `items` (id, code) of its valid rows and `users` of all users named.

    Returns: reason → number of rows skipped.
    """
    broken = _rejected(connection, where, skip)
    faults = connection.execute("SELECT fault, count(*), min(rowid) FROM raw GROUP BY fault").fetchall()
    bad = {int(fault): (int(count), int(row)) for fault, count, row in faults if fault not in (OK, FILTERED)}
    if QUOTE in bad and _spans(connection, found):
        _refuse(connection, found, where, QUOTE, bad[QUOTE][1])
    if bad and not skip:
        fault = min(bad, key=lambda fault: bad[fault][1])
        _refuse(connection, found, where, fault, bad[fault][1])
    counted = {WORDS[fault]: count for fault, (count, _) in bad.items()}
    for table, column, fault in (("users", "u", USER), ("items", "i", ITEM)):
        odd = _number(connection, table, column)
        if odd is None:
            continue
        if not skip:
            _refuse(connection, found, where, fault, odd)
        counted[WORDS[fault]] = counted.get(WORDS[fault], 0) + _mark_odd(connection, table, column, fault)
    if any(connection.execute(f"SELECT count(*) FROM {table} WHERE odd").fetchone()[0] for table in ("users", "items")):
        for table, column in (("users", "u"), ("items", "i")):  # rows were marked: number the remaining ones
            _number(connection, table, column)
    mixed = _mixed(connection, where, skip)
    if mixed:
        counted[WORDS[TIME]] = counted.get(WORDS[TIME], 0) + mixed
        _number(connection, "items", "i")
    return {**({ENCODING: broken} if broken else {}), **counted}


def _number(connection: Connection, table: str, column: str) -> int | None:
    """Create the table of ids by first appearance; returns the first row whose id has a line break or zero byte."""
    odd = " OR ".join(f"contains({column}, chr({code}))" for code in (0, 10, 13))
    named = (
        f"u IS NOT NULL AND fault NOT IN ({', '.join(map(str, (*UNREADABLE, USER)))})"
        if table == "users"
        else f"fault = {OK}"
    )
    connection.execute(
        f"CREATE OR REPLACE TABLE {table} AS SELECT id, row_number() OVER (ORDER BY first) - 1 AS code, first, odd "
        f"FROM (SELECT {column} AS id, min(rowid) AS first, {odd} AS odd FROM raw WHERE {named} GROUP BY {column})"
    )
    row = connection.execute(f"SELECT min(first) FROM {table} WHERE odd").fetchone()[0]
    return None if row is None else int(row)


def _mark_odd(connection: Connection, table: str, column: str, fault: int) -> int:
    """Mark rows with invalid ids; those that were valid before are counted here, the others were counted earlier."""
    odd = f"{column} IN (SELECT id FROM {table} WHERE odd)"
    good = int(connection.execute(f"SELECT count(*) FROM raw WHERE fault = {OK} AND {odd}").fetchone()[0])
    connection.execute(f"UPDATE raw SET fault = {fault} WHERE fault NOT IN {UNREADABLE} AND {odd}")
    return good


def _rejected(connection: Connection, where: str, skip: bool) -> int:
    """Lines that DuckDB rejected: invalid UTF-8, or too long."""
    try:
        rows = connection.execute("SELECT DISTINCT file_id, byte_position, line FROM reject_errors").fetchall()
    except Exception as error:
        if "reject_errors" not in str(error):
            raise
        return 0  # no text file was read
    if rows and not skip:
        kind = connection.execute("SELECT error_type FROM reject_errors ORDER BY file_id, line LIMIT 1").fetchone()[0]
        line = min(row[2] for row in rows)
        if kind == "LINE SIZE OVER MAXIMUM":
            raise DpformerError(f"{where}, line {line} is too long for a row of a log: {_SKIP.removeprefix('or ')}")
        raise DpformerError(
            f"{where}, line {line} is not UTF-8: give --encoding (latin-1, utf-16) if the file is not, {_SKIP}"
        )
    return len({(file, line) for file, _, line in rows})


def _mixed(connection: Connection, where: str, skip: bool) -> int:
    """The number of rows skipped because their user has times of both kinds and they are of the rarer kind.

    Times are compared within one user only, so the intended kind depends on that user's rows alone.
    """
    kinds = connection.execute(
        f"SELECT kind, min(rowid) FROM raw WHERE fault = {OK} GROUP BY kind ORDER BY kind"
    ).fetchall()
    if len(kinds) < 2:
        return 0
    if not skip:
        raise DpformerError(
            f"{where} has times that are numbers (row {kinds[0][1] + 1} of the data) and times that are dates (row "
            f"{kinds[1][1] + 1}): use one kind, {_SKIP}"
        )
    dates = "count(*) FILTER (kind = 1) > count(*) FILTER (kind = 0)"
    meant = f"SELECT u, CASE WHEN {dates} THEN 1 ELSE 0 END AS kind FROM raw WHERE fault = {OK} GROUP BY u"
    changed = connection.execute(
        f"UPDATE raw SET fault = {TIME} FROM ({meant}) AS meant WHERE raw.fault = {OK} AND raw.u = meant.u "
        "AND raw.kind <> meant.kind"
    ).fetchone()
    return int(changed[0])


def _refuse(connection: Connection, found: Relation, where: str, fault: int, row: int) -> None:
    where = f"{where}, row {row + found.first_row}"
    if fault in UNREADABLE:
        raise DpformerError(f"{where} {_shape(connection, found, fault, row)}")
    user, item, time, rating = connection.execute(
        f"SELECT user, item, time, rating FROM ({found.cells}) LIMIT 1 OFFSET {row}"
    ).fetchone()
    if fault in (USER, ITEM):
        name, value = ("user_id", user) if fault == USER else ("item_id", item)
        seen = "its cell is empty" if value is None or not value.strip() else f"{shown(value)} is not an id"
        raise DpformerError(f"{where} has no {name}: {seen}; complete the row, {_SKIP}")
    if fault == TIME:
        seen = "is missing" if time is None or not time.strip() else f"{shown(time)} is not a time"
        raise DpformerError(
            f"{where}: the timestamp {seen}; give numbers such as seconds since 1970, or ISO dates (2024-01-31 10:00), "
            f"{_SKIP}, or give --order file if rows are in the order of time"
        )
    if fault == EVENT:
        query = f'SELECT CAST("{found.event}" AS VARCHAR) FROM ({found.cells}) LIMIT 1 OFFSET {row}'
        event = connection.execute(query).fetchone()[0]
        seen = "is missing" if event is None else f"{shown(event)} has no weight"
        raise DpformerError(
            f"{where}: the event {seen}; add it to --event-weights, drop its rows with --where, {_SKIP}"
        )
    seen = "is missing" if rating is None or not rating.strip() else f"{shown(rating)} is not a finite number"
    raise DpformerError(f"{where}: the rating {seen}; complete it, {_SKIP}")


def _spans(connection: Connection, found: Relation) -> bool:
    """Whether a quoted field may span several lines, so that it is unclear whether the lines between are rows."""
    return found.broken_field is not None and bool(connection.execute(found.broken_field).fetchone()[0])


def _shape(connection: Connection, found: Relation, fault: int, row: int) -> str:
    line = ""
    if found.lines is not None:
        query = f"SELECT line FROM {found.lines} WHERE line IS NOT NULL AND trim(line) <> '' LIMIT 1 OFFSET {row}"
        line = f": {shown(connection.execute(query).fetchone()[0])}"
    if fault == QUOTE:
        return (
            f"has an unclosed quote{line}; give --no-quotes if quotes are ordinary characters, or convert the log to "
            f"JSON lines or Parquet{'' if _spans(connection, found) else f', {_SKIP}'}"
        )
    if fault == TWICE:
        return f"has a duplicate key{line}, so its user is ambiguous: remove one, {_SKIP}"
    if fault == JSON:
        return f"is not a JSON object{line}; give one object per line, {_SKIP}"
    return f"has a different number of fields than the header or the first row{line}; complete it, {_SKIP}"
