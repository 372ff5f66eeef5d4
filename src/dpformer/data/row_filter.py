"""`--where`: an SQL condition on the columns of one row, which cannot refer to anything else.

A filter costs no privacy if its result for a row is a function of that row alone. So the condition is parsed by DuckDB,
which will run it, and every node of its syntax tree must be on a list: columns, constants, comparisons, logic, casts,
CASE, and the deterministic functions in `FUNCTIONS`. Anything else is refused: subqueries, aggregates and windows read
other users' rows; the time of day or a random number would give another result next time. DuckDB runs SQL that is
generated from the checked tree, never the text that was given.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dpformer.errors import DpformerError

if TYPE_CHECKING:
    from dpformer.data.event_weights import EventWeights

PREFIX = "where:"  # prefix of the columns of a condition, to avoid name clashes
_TEMPLATE = "SELECT * FROM log WHERE ("
_KINDS = {
    "COLUMN_REF", "CONSTANT", "COMPARISON", "CONJUNCTION", "OPERATOR", "BETWEEN", "CASE", "CAST", "FUNCTION", "TYPE",
}  # fmt: skip
_FUNCTIONS_BY_SUBJECT = {
    "text": """lower upper trim ltrim rtrim length strlen left right substring substr replace reverse concat concat_ws
        || contains starts_with ends_with prefix suffix instr strpos position split_part string_split regexp_matches
        regexp_full_match regexp_extract regexp_replace ~~ !~~ ~~* !~~* ~~~ ^@ like_escape ilike_escape not_like_escape
        not_ilike_escape nfc_normalize strip_accents""",
    "numbers": """+ - * / // % ** ^ abs sign floor ceil ceiling round trunc sqrt exp ln log log2 log10 pow power mod
        greatest least isnan isinf isfinite""",
    "times": """year month day hour minute second quarter week weekday dayofweek isodow dayofyear date_part datepart
        date_trunc datetrunc date_diff datediff date_add strftime strptime try_strptime make_date make_timestamp epoch
        epoch_ms epoch_us epoch_ns to_timestamp to_years to_months to_weeks to_days to_hours to_minutes to_seconds
        to_milliseconds to_microseconds""",
    "missing values": "coalesce ifnull nullif if",
    "lists and objects": """list_value list_contains list_has array_contains array_extract list_extract struct_extract
        map_extract len json_extract json_extract_string json_extract_path json_extract_path_text -> ->>""",
}
FUNCTIONS = frozenset(" ".join(_FUNCTIONS_BY_SUBJECT.values()).split())


@dataclass(frozen=True)
class RowFilter:
    """A checked condition.

    Attributes:
        sql: SQL over the columns `alias(name)`.
        columns: the columns it uses, as written; the last one is that of events, if rows have weights.
        weight: SQL of the weight of a row, over the same columns; None: rows have no weights.
    """

    sql: str
    columns: tuple[str, ...]
    weight: str | None = None

    @classmethod
    def parse(cls, condition: str) -> RowFilter:
        """Check a condition such as "event = 'purchase' AND TRY_CAST(price AS DOUBLE) > 5"."""
        import duckdb

        from dpformer.engines.duckdb_connection import first_line

        with duckdb.connect(":memory:") as connection:
            try:
                parsed = _parsed(connection, condition)
                columns: dict[str, None] = {}
                _check(_condition_of(parsed), columns, condition)
                (sql,) = connection.execute("SELECT json_deserialize_sql(?)", [json.dumps(parsed)]).fetchone() or ("",)
            except duckdb.Error as error:
                raise DpformerError(f"--where {condition!r} is not a condition in SQL: {first_line(error)}") from None
        if not columns:
            raise DpformerError(f"--where {condition!r} names no column of the log")
        return cls(str(sql).partition(" WHERE ")[2], tuple(columns))

    def with_weight(self, column: str, weights: EventWeights) -> RowFilter:
        """The same condition, and weights by a column of events."""
        from dpformer.engines.duckdb_connection import name

        columns = (*self.columns, column)
        return replace(self, columns=columns, weight=weights.sql(name(f"{PREFIX}{len(self.columns)}")))

    @property
    def event(self) -> str | None:
        """The alias of the column of events."""
        return None if self.weight is None else f"{PREFIX}{len(self.columns) - 1}"

    @property
    def option(self) -> str:
        """The option it comes from, for messages."""
        return "--where" if self.weight is None or len(self.columns) > 1 else "--event-weights"

    def on(self, names: list[str], where: str) -> RowFilter:
        """The same condition with the column names of a log, compared without case if that is unambiguous."""
        by_name = {name.lower(): name for name in reversed(names)}
        missing = [name for name in self.columns if name not in names and name.lower() not in by_name]
        if missing:
            from dpformer.data.columns import listed

            if self.weight is not None and missing == [self.columns[-1]]:
                raise DpformerError(
                    f"{where} has no column {missing[0]!r} for --event-weights; it has {listed(names)}: give its name "
                    "with --event-column"
                )
            raise DpformerError(
                f"--where uses a column {missing[0]!r}, but {where} has {listed(names)}; --where '' reads all rows"
            )
        return replace(self, columns=tuple(name if name in names else by_name[name.lower()] for name in self.columns))

    def select(self, column: Callable[[str], str]) -> str:
        """SQL of its columns under their aliases, for a SELECT; `column` gives the SQL of each."""
        from dpformer.engines.duckdb_connection import name

        aliases = (f"{PREFIX}{number}" for number in range(len(self.columns)))
        return "".join(f", {column(own)} AS {name(alias)}" for own, alias in zip(self.columns, aliases, strict=True))


def _parsed(connection: Any, condition: str) -> dict[str, Any]:
    """The syntax tree of a SELECT that has the condition and nothing else."""

    def tree(text: str) -> dict[str, Any]:
        (found,) = connection.execute("SELECT json_serialize_sql(CAST(? AS VARCHAR))", [text]).fetchone()
        return dict(json.loads(found))

    found, bare = tree(f"{_TEMPLATE}\n{condition}\n)"), tree(f"{_TEMPLATE}true)")
    if found["error"]:
        raise DpformerError(f"--where {condition!r} is not a condition in SQL: {found['error_message']}")
    rest = deepcopy(found)
    rest["statements"][0]["node"]["where_clause"] = _condition_of(bare)
    if _without_places(rest) != _without_places(bare):
        raise DpformerError(f"--where {condition!r} is more than one condition: give a single one, as after WHERE")
    return found


def _condition_of(tree: dict[str, Any]) -> dict[str, Any]:
    return dict(tree["statements"][0]["node"])["where_clause"]


def _without_places(node: Any) -> Any:
    """A tree without the text positions of its nodes."""
    if isinstance(node, dict):
        return {name: _without_places(part) for name, part in node.items() if not name.startswith("query_location")}
    return [_without_places(part) for part in node] if isinstance(node, list) else node


def _check(node: Any, columns: dict[str, None], condition: str) -> None:
    """Refuse nodes that are not on the list, collect the columns, and replace them by their aliases."""
    if isinstance(node, list):
        for part in node:
            _check(part, columns, condition)
        return
    if not isinstance(node, dict):
        return
    kind = node.get("class")
    if kind is not None and kind not in _KINDS:
        raise DpformerError(_refusal(condition, _WORDS.get(kind, kind.lower().replace("_", " "))))
    if kind == "FUNCTION":
        function = str(node["function_name"]).lower()
        if function not in FUNCTIONS or node.get("schema") or node.get("catalog"):
            raise DpformerError(_refusal(condition, f"the function {function}"))
        if node.get("distinct") or node.get("filter") or (node.get("order_bys") or {}).get("orders"):
            raise DpformerError(_refusal(condition, "an aggregate"))
    if kind == "COLUMN_REF":
        if len(node["column_names"]) != 1:
            raise DpformerError(
                f"--where {condition!r}: {'.'.join(node['column_names'])} is not a column name; quote a name that has "
                "a dot (\"a.b\"), and access a part of an object as object['part']"
            )
        (name,) = node["column_names"]
        columns.setdefault(name)
        node["column_names"] = [f"{PREFIX}{list(columns).index(name)}"]
        return
    for part in node.values():
        _check(part, columns, condition)


_WORDS = {
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function",
    "STAR": "*",
    "PARAMETER": "a parameter",
    "LAMBDA": "a lambda",
}


def _refusal(condition: str, what: str) -> str:
    return (
        f"--where {condition!r} contains {what}: it may use the columns of one row, constants, comparisons, AND, OR, "
        "NOT, IN, LIKE, BETWEEN, CASE, casts and deterministic functions of single values, so that no row affects "
        "another"
    )
