"""Parquet files: `--query` sees them as table `log`."""

from pathlib import Path

from dpformer.data.readers.formats import Format, Given
from dpformer.data.readers.relation import Relation
from dpformer.data.readers.split_line import no_glob
from dpformer.data.readers.typed_table import table
from dpformer.engines.duckdb_connection import confine, text


def read(given: Given) -> Relation:
    return table(given.connection, select(given), given.wanted)


def select(given: Given) -> str:
    rows, query = parquet(given.files, given.together), given.wanted.reading.query
    if query is None:
        return rows
    confine(given.connection, given.files)
    given.connection.execute(f"CREATE TEMP VIEW log AS {rows}")
    return query


def parquet(files: list[Path], together: bool) -> str:
    """SQL of the rows of Parquet files; folders such as `day=7` are columns, of text."""
    names = ", ".join(text(no_glob(file)) for file in files)
    parts = "true" if together else "false"
    return f"SELECT * FROM read_parquet([{names}], hive_partitioning = {parts}, hive_types_autocast = false)"


FORMATS = (Format("parquet", "Parquet", (".parquet", ".pq"), read, magic=b"PAR1", tables=True, select=select),)
