"""Parquet files."""

from pathlib import Path

from dpformer.data.readers.split_line import no_glob
from dpformer.engines.duckdb_connection import text


def parquet(files: list[Path]) -> str:
    """SQL of the rows of Parquet files; folders such as `day=7` are columns, of text."""
    names = ", ".join(text(no_glob(file)) for file in files)
    parts = "true" if len(files) > 1 else "false"
    return f"SELECT * FROM read_parquet([{names}], hive_partitioning = {parts}, hive_types_autocast = false)"
