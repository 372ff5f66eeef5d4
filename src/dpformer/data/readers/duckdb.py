"""Tables and views of a DuckDB file."""

from pathlib import Path

from dpformer.data.readers.formats import Format, Given
from dpformer.data.readers.relation import Relation
from dpformer.data.readers.typed_table import only_table, table
from dpformer.data.reading import Reading
from dpformer.engines.duckdb_connection import Connection, confine, name, text
from dpformer.errors import DpformerError


def read(given: Given) -> Relation:
    return table(given.connection, select(given), given.wanted)


def select(given: Given) -> str:
    return duckdb_table(given.connection, given.files, given.wanted.reading)


def duckdb_table(connection: Connection, files: list[Path], reading: Reading) -> str:
    if len(files) != 1:
        raise DpformerError(f"{len(files)} DuckDB files were given: give one")
    connection.execute(f"ATTACH {text(str(files[0].resolve()))} AS given (READ_ONLY)")
    if reading.query is not None:
        connection.execute("SET search_path = 'memory.main,given.main'")
        confine(connection, files)
        return reading.query
    confine(connection, files)  # its views are SQL too
    query = "SELECT table_name FROM duckdb_tables() WHERE database_name = 'given' UNION ALL SELECT view_name FROM "
    query += "duckdb_views() WHERE database_name = 'given' AND NOT internal"
    chosen = only_table([row[0] for row in connection.execute(query).fetchall()], reading.table, files[0])
    return f"SELECT * FROM given.{name(chosen)}"


FORMATS = (Format("duckdb", "DuckDB", (".duckdb", ".ddb"), read, tables=True, select=select),)
