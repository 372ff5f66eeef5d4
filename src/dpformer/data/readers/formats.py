"""From a path to its relation: the one place that knows all formats."""

from pathlib import Path

from dpformer.data.columns import Columns
from dpformer.data.readers.delimited import text_lines
from dpformer.data.readers.duckdb import duckdb_table
from dpformer.data.readers.jsonl import json_lines
from dpformer.data.readers.parquet import parquet
from dpformer.data.readers.relation import Relation, Wanted
from dpformer.data.readers.sqlite import sqlite_table
from dpformer.data.readers.typed_table import table
from dpformer.data.reading import FORMATS, Reading, format_of
from dpformer.data.sources.files import files_of, unpacked
from dpformer.engines.duckdb_connection import Connection
from dpformer.errors import DpformerError


def relation(
    connection: Connection, path: Path, columns: Columns, reading: Reading, *, rating: bool, folder: Path
) -> Relation:
    """The log at a path.

    Args:
        connection: the DuckDB that will run the SQL.
        path: a file, folder, glob, database, or `-` for standard input.
        columns: names of columns where they are not the usual ones.
        reading: what else is declared.
        rating: whether the ratings are needed.
        folder: private, for what has to be unpacked.
    """
    files = files_of(path)
    kinds = {format_of(file, reading) for file in files}
    if len(kinds) > 1:
        raise DpformerError(f"{path} holds files of several formats ({', '.join(sorted(kinds))}): give one with a glob")
    (kind,) = kinds
    wanted = Wanted(columns, reading, rating, "standard input" if path.name == "-" else str(path))
    if kind in ("parquet", "duckdb"):
        select = parquet(files) if kind == "parquet" else duckdb_table(connection, files, reading)
        return table(connection, select, kind, wanted, files)
    if kind == "sqlite":
        return sqlite_table(files, wanted, folder)
    if reading.table is not None or reading.query is not None:
        raise DpformerError(f"--table and --query are for databases and Parquet; {wanted.where} is {FORMATS[kind]}")
    if kind == "jsonl":
        return json_lines(unpacked(files, reading, folder), wanted)
    return text_lines(connection, unpacked(files, reading, folder), kind, wanted)
