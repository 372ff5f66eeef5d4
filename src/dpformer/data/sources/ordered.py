"""Rows that come without an order, from a database or table format: what is needed of them, and in which order.

They are ordered by time, user and item, so that the same rows are the same log, in whatever order they come.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpformer.data.columns import Columns, resolve
from dpformer.data.filters import Filters
from dpformer.data.reading import Reading
from dpformer.data.sources.elsewhere import Asked
from dpformer.engines.duckdb_connection import connect, name, text
from dpformer.errors import DpformerError


def needed(names: list[str], columns: Columns, reading: Reading, filters: Filters, where: str) -> list[str]:
    """The columns of a log that are read, by which its rows are ordered: time, user and item first."""
    if reading.order != "time":
        raise DpformerError(f"rows of {where} have no order: give a timestamp column, not --order file")
    roles = resolve(names, columns, rating=filters.min_rating is not None, order="time", where=where)
    wanted = [roles[role] for role in ("timestamp", "user", "item", "rating") if role in roles]
    if filters.row_filter is not None:
        wanted += filters.row_filter.on(names, where).columns
    return list(dict.fromkeys(wanted))


def stored(asked: Asked, batches: Any, order: list[str]) -> Path:
    """A private Parquet file of an Arrow stream, its rows ordered by columns."""
    path = asked.folder / "rows.parquet"
    with connect(asked.reading.memory, str(asked.url)) as connection:
        connection.register("rows", batches)
        by = ", ".join(name(column) for column in order)
        connection.execute(f"COPY (SELECT * FROM rows ORDER BY {by}) TO {text(str(path))} (FORMAT parquet)")
    return path


def refuse_format(asked: Asked, kind: str) -> None:
    """A format is declared for files alone."""
    if asked.reading.format is not None:
        raise DpformerError(f"--format is for files, and {asked.url} is {kind}: leave it out")
