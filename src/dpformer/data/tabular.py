"""Tables that have a schema: Parquet, DuckDB, SQLite. Their types are declared, by the file."""

from pathlib import Path

from dpformer.data.columns import Columns
from dpformer.data.engine import Connection, confine, name, text
from dpformer.data.fields import OK, no_glob
from dpformer.data.files import only_table, sqlite_columns, sqlite_rows
from dpformer.data.json_lines import json_lines
from dpformer.data.reading import FORMATS, Reading
from dpformer.data.relation import Relation, Wanted, rows
from dpformer.data.values import id_of, nested, rating_of, time_of
from dpformer.errors import DpformerError

_CELLS = {"user": "user", "item": "item", "timestamp": "time", "rating": "rating"}


def parquet(files: list[Path]) -> str:
    """SQL of the rows of Parquet files; folders such as `day=7` are columns, of text."""
    names = ", ".join(text(no_glob(file)) for file in files)
    parts = "true" if len(files) > 1 else "false"
    return f"SELECT * FROM read_parquet([{names}], hive_partitioning = {parts}, hive_types_autocast = false)"


def duckdb_table(connection: Connection, files: list[Path], reading: Reading) -> str:
    if len(files) != 1:
        raise DpformerError(f"{len(files)} DuckDB files were given: give one")
    connection.execute(f"ATTACH {text(str(files[0].resolve()))} AS given (READ_ONLY)")
    if reading.query is not None:
        connection.execute("SET search_path = 'memory.main,given.main'")
        confine(connection, files)
        return reading.query
    confine(connection, files)  # a view of it is SQL too
    query = "SELECT table_name FROM duckdb_tables() WHERE database_name = 'given' UNION ALL SELECT view_name FROM "
    query += "duckdb_views() WHERE database_name = 'given' AND NOT internal"
    table = only_table([row[0] for row in connection.execute(query).fetchall()], reading.table, files[0])
    return f"SELECT * FROM given.{name(table)}"


def table(connection: Connection, select: str, kind: str, wanted: Wanted, files: list[Path]) -> Relation:
    if wanted.reading.query is not None and kind == "parquet":
        confine(connection, files)
        connection.execute(f"CREATE TEMP VIEW log AS {select}")
        select = wanted.reading.query
    described = connection.execute(f"DESCRIBE {select}").fetchall()
    kinds = {str(row[0]): str(row[1]) for row in described}
    roles = wanted.resolve(list(kinds))
    for role, column in roles.items():
        if nested(kinds[column]):
            raise DpformerError(
                f"{wanted.where}: the {role} column {column!r} is of type {kinds[column]}: give another"
            )
    user, item = (id_of(roles[role], kinds[roles[role]]) for role in ("user", "item"))
    time = time_of(roles["timestamp"], kinds[roles["timestamp"]]) if "timestamp" in roles else None
    rating = rating_of(f"CAST({name(roles['rating'])} AS VARCHAR)") if "rating" in roles else None
    cells = ", ".join(
        f"CAST({name(roles[role]) if role in roles else 'NULL'} AS VARCHAR) AS {cell}" for role, cell in _CELLS.items()
    )
    sql = rows(select, user, item, time, rating, str(OK))
    return Relation(sql, FORMATS[kind], roles.get("timestamp"), 1, f"SELECT {cells} FROM ({select})")


def sqlite_table(files: list[Path], wanted: Wanted, folder: Path) -> Relation:
    if wanted.reading.query is not None:
        raise DpformerError(
            "--query is for DuckDB and Parquet; make a view in the SQLite file and give it with --table"
        )
    if len(files) != 1:
        raise DpformerError(f"{len(files)} SQLite files were given: give one")
    table, names = sqlite_columns(files[0], wanted.reading.table)
    roles = wanted.resolve(names)
    folder.mkdir(parents=True, exist_ok=True)
    sqlite_rows(files[0], table, roles, folder / "rows.jsonl")
    again = Wanted(Columns(*("user", "item", "timestamp", "rating")), wanted.reading, wanted.rating, wanted.where)
    found = json_lines([folder / "rows.jsonl"], again)
    return Relation(found.sql, FORMATS["sqlite"], roles.get("timestamp"), 1, found.cells)
