"""Tables with a schema: Parquet, DuckDB, SQLite. Their types are declared by the file."""

from pathlib import Path

from dpformer.data.readers.parse_cell import id_of, nested, rating_of, time_of
from dpformer.data.readers.relation import Relation, Wanted, rows
from dpformer.data.readers.split_line import OK
from dpformer.engines.duckdb_connection import Connection, name
from dpformer.errors import DpformerError

_CELLS = {"user": "user", "item": "item", "timestamp": "time", "rating": "rating"}


def table(connection: Connection, select: str, wanted: Wanted) -> Relation:
    """The relation for the result of a SELECT."""
    described = connection.execute(f"DESCRIBE {select}").fetchall()
    kinds = {str(row[0]): str(row[1]) for row in described}
    roles = wanted.resolve(list(kinds))
    for role, column in roles.items():
        if nested(kinds[column]):
            raise DpformerError(
                f"{wanted.where}: the {role} column {column!r} has the unsupported type {kinds[column]}: choose another"
            )
    user, item = (id_of(roles[role], kinds[roles[role]]) for role in ("user", "item"))
    time = time_of(roles["timestamp"], kinds[roles["timestamp"]]) if "timestamp" in roles else None
    rating = rating_of(f"CAST({name(roles['rating'])} AS VARCHAR)") if "rating" in roles else None
    row_filter = wanted.row_filter(list(kinds))
    cells = ", ".join(
        f"CAST({name(roles[role]) if role in roles else 'NULL'} AS VARCHAR) AS {cell}" for role, cell in _CELLS.items()
    )
    more = "" if row_filter is None else row_filter.select(name)
    sql = rows(wanted, f"SELECT *{more} FROM ({select})", user, item, time, rating, str(OK), row_filter)
    return Relation(sql, roles.get("timestamp"), 1, f"SELECT {cells}{more} FROM ({select})", filtered=True)


def only_table(found: list[str], chosen: str | None, path: Path) -> str:
    if chosen is None and len(found) == 1:
        return found[0]
    if chosen in found:
        assert chosen is not None
        return chosen
    said = "choose one with --table" if chosen is None else f"there is no table {chosen!r}"
    raise DpformerError(f"{path} has the tables {', '.join(found[:12]) or '(none)'}: {said}")
