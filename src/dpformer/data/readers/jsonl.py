"""JSON lines: objects may have different keys, so each row uses the first usual name that *it* has."""

import json
from pathlib import Path

from dpformer.data.columns import JSON_KEYS
from dpformer.data.readers.formats import Format, Given
from dpformer.data.readers.parse_cell import EXACT_BELOW, id_of_text, rating_of, time_of_text
from dpformer.data.readers.relation import Relation, Wanted, rows
from dpformer.data.readers.split_line import JSON, OK, TWICE, lines
from dpformer.data.sources.files import unpacked
from dpformer.engines.duckdb_connection import text

_IDS = ("user", "item")


def _id_of_float(value: str) -> str:
    """A number with a decimal point or exponent as an id, as in `id_of`."""
    number = f"TRY_CAST({value} AS DOUBLE)"
    whole = f"CAST(CAST({number} AS BIGINT) AS VARCHAR)"
    exact = f"abs({number}) < {EXACT_BELOW['DOUBLE']}"
    whole = f"WHEN {number} = floor({number}) THEN {whole}"
    return f"CASE WHEN NOT coalesce({exact}, false) THEN NULL {whole} ELSE {value} END"


def read(given: Given) -> Relation:
    return json_lines(unpacked(given.files, given.wanted.reading, given.folder), given.wanted)


def json_lines(files: list[Path], wanted: Wanted) -> Relation:
    """One object per line; other lines are invalid."""
    roles = ["user", "item"] + ["timestamp"] * (wanted.reading.order == "time") + ["rating"] * wanted.rating
    found = {role: getattr(wanted.columns, role) for role in roles}
    keys = {role: (found[role],) if found[role] else JSON_KEYS[role] for role in roles}
    row_filter = wanted.row_filter(None)
    paths = [key for role in roles for key in keys[role]] + [*(row_filter.columns if row_filter else ())]
    listed_paths = ", ".join(text("$." + json.dumps(key, ensure_ascii=False)) for key in paths)
    values, start = {}, 0
    for role in roles:
        places = range(start, start + len(keys[role]))
        given = ", ".join(f"nullif(s[{place + 1}], 'null')" for place in places)
        first = f"coalesce({given}, NULL)"
        # Lists and objects are not ids, numbers or times; strings are unquoted.
        cases = f"WHEN starts_with({first}, '[') OR starts_with({first}, '{{') THEN NULL"
        if role in _IDS:
            cases += f" WHEN regexp_matches({first}, '^-?[0-9].*[.eE]') THEN {_id_of_float(first)}"
        values[role] = f"CASE {cases} ELSE {first} ->> '$' END"
        start += len(keys[role])
    more = ""
    if row_filter is not None:  # lists and objects as JSON
        more = row_filter.select(lambda key: f"(s[{paths.index(key, start) + 1}] ->> '$')")
    source = lines(files, 0)
    # DuckDB takes the first of duplicate keys, which would leave the user of the row ambiguous.
    keyed = f"list_filter(json_keys(line), lambda key: key IN ({', '.join(map(text, paths))}))"
    fault = f"CASE WHEN len({keyed}) > len(list_distinct({keyed})) THEN {TWICE} ELSE {OK} END"
    select = (
        f"SELECT CASE WHEN fault = {OK} THEN CAST(json_extract(line, [{listed_paths}]) AS VARCHAR[]) END AS s, fault "
        f"FROM (SELECT line, CASE WHEN json_valid(line) AND json_type(line) = 'OBJECT' THEN {fault} ELSE {JSON} END "
        f"AS fault FROM {source} WHERE line IS NOT NULL AND trim(line) <> '')"
    )
    time = time_of_text("time") if "timestamp" in values else None
    select = (
        f"SELECT {values['user']} AS user, {values['item']} AS item, "
        f"{'trim(' + values['timestamp'] + ')' if time else 'NULL'} AS time, "
        f"{values.get('rating', 'NULL')} AS rating, fault{more} FROM ({select})"
    )
    rating = rating_of("rating") if "rating" in values else None
    sql = rows(wanted, select, id_of_text("user"), id_of_text("item"), time, rating, "fault", row_filter)
    column = (wanted.columns.timestamp or "timestamp") if time else None
    return Relation(sql, column, 1, select, source, filtered=True)


FORMATS = (Format("jsonl", "JSON lines", (".jsonl", ".ndjson", ".json"), read),)
