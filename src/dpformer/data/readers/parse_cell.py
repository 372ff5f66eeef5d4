r"""Values to ids, times and ratings, in SQL: each a fixed function of its own cell.

A time becomes whole units and billionths (t, f), so that nanoseconds and fractions are exact: numbers unchanged
(seconds, milliseconds or nanoseconds since 1970, or any counter), dates as seconds since 1970, in UTC unless they
have a time zone. Numeric times and dates must not be mixed in one log.
"""

from dpformer.engines.duckdb_connection import name

NUMBER, DATE = 0, 1
_TEXT = ("VARCHAR", "UUID", "ENUM")
_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "HUGEINT")
_NESTED = ("STRUCT", "MAP", "UNION", "LIST")
EXACT_BELOW = {"FLOAT": 2**24, "DOUBLE": 2**53}  # integers below are exact as floats
US = 1_000_000


def id_of_text(value: str) -> str:
    """Text without surrounding blanks; NULL if nothing remains."""
    return f"nullif({trimmed(value)}, '')"


def trimmed(value: str) -> str:
    """Text without surrounding spaces and tabs; tabs are rare, and finding them is cheaper than removing them."""
    return f"CASE WHEN contains({value}, chr(9)) THEN trim({value}, ' ' || chr(9)) ELSE trim({value}) END"


def id_of(column: str, kind: str) -> str:
    """An id of a typed column: as text; an integral float as an integer (missing values turn integers into floats).

    From 2⁵³ (2²⁴ in single precision), floats are not accepted as ids, because they stand for several integers.
    """
    value = name(column)
    if kind in EXACT_BELOW:
        whole = f"CAST(CAST({value} AS HUGEINT) AS VARCHAR)"
        other = f"CAST({value} AS VARCHAR)"
        exact = f"isfinite({value}) AND abs({value}) < {EXACT_BELOW[kind]}"
        return f"CASE WHEN NOT ({exact}) THEN NULL WHEN {value} = floor({value}) THEN {whole} ELSE {other} END"
    return id_of_text(f"CAST({value} AS VARCHAR)")


def nested(kind: str) -> bool:
    """Whether a column's type cannot be an id or a number."""
    return kind.endswith("]") or kind.startswith(_NESTED)


def time_of_text(value: str) -> tuple[str, str, str]:
    """(t, f, kind) of text; t is NULL if it is not a time."""
    whole = f"CASE WHEN contains({value}, '.') THEN NULL ELSE TRY_CAST({value} AS BIGINT) END"
    exact = f"TRY_CAST({value} AS DECIMAL(38, 9))"
    # The cast accepts words (`epoch`, `infinity`) and years before Christ that are not ISO dates.
    iso = f"regexp_matches({value}, '^[0-9]{{4}}[-/]') AND NOT contains({value}, '(')"
    instant = f"CASE WHEN {iso} THEN epoch_us(TRY_CAST({value} AS TIMESTAMPTZ)) END"
    t = f"coalesce({whole}, TRY_CAST(floor({exact}) AS BIGINT), {_floor(instant, US)})"
    f = (
        f"CASE WHEN ({whole}) IS NOT NULL THEN 0 WHEN {exact} IS NOT NULL THEN CAST(({exact} - floor({exact})) * "
        f"1000000000 AS INTEGER) ELSE CAST({_rest(instant, US)} * 1000 AS INTEGER) END"
    )
    kind = f"CASE WHEN ({whole}) IS NOT NULL OR {exact} IS NOT NULL THEN {NUMBER} ELSE {DATE} END"
    return t, f, kind


def whole_time(value: str) -> tuple[str, str, str]:
    """(t, f, kind) of text that is an integer or empty; anything else fails. Knowing the kind quarters the time."""
    fails = f"CAST({value} || 'x' AS BIGINT)"  # a fraction would be rounded
    return f"CASE WHEN contains({value}, '.') THEN {fails} ELSE CAST({value} AS BIGINT) END", "0", str(NUMBER)


def time_of(column: str, kind: str) -> tuple[str, str, str]:
    """(t, f, kind) of a typed column."""
    value = name(column)
    if kind in _WHOLE:
        return f"TRY_CAST({value} AS BIGINT)", "0", str(NUMBER)
    if kind == "TIMESTAMP_NS":
        ns = f"CASE WHEN isfinite({value}) THEN epoch_ns({value}) END"
        return _floor(ns, 10**9), f"CAST({_rest(ns, 10**9)} AS INTEGER)", str(DATE)
    if kind.startswith(("TIMESTAMP", "DATE")):
        us = f"CASE WHEN isfinite({value}) THEN epoch_us({value}) END"
        return _floor(us, US), f"CAST({_rest(us, US)} * 1000 AS INTEGER)", str(DATE)
    return time_of_text(f"trim(CAST({value} AS VARCHAR), ' \t')")


def _floor(value: str, unit: int) -> str:
    return f"(({value}) - {_rest(value, unit)}) // {unit}"


def _rest(value: str, unit: int) -> str:
    """The remainder of a division by the unit, never negative."""
    return f"(((({value}) % {unit}) + {unit}) % {unit})"


def rating_of(value: str) -> str:
    """A finite number, or NULL."""
    number = f"TRY_CAST({value} AS DOUBLE)"
    return f"CASE WHEN isfinite({number}) THEN {number} END"
