"""Delta tables, here or in an object store, by delta-rs: the rows of one version, without those that were deleted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpformer.data.sources.elsewhere import Asked, Brought, Source
from dpformer.data.sources.ordered import refuse_format, stored
from dpformer.data.sources.urls import Url
from dpformer.engines.duckdb_connection import first_line, name
from dpformer.errors import DpformerError, MissingExtra

TITLE = "Delta"


def bring(asked: Asked) -> Brought:
    """Copies the needed columns of a version, by default of the current one."""
    refuse_format(asked, "a Delta table")
    library, wanted = _library(), asked.reading.snapshot
    if wanted is not None and not wanted.isdecimal():
        raise DpformerError(f"snapshot is {wanted!r}; give the version of the Delta table {asked.url}, such as 12")
    table = _table(asked.url, None if wanted is None else int(wanted))
    names = [field.name for field in table.schema().fields]
    columns = names if asked.reading.query is not None else asked.choose(names)
    selected = ", ".join(name(column) for column in columns)
    try:
        rows = library.QueryBuilder().register("log", table).execute(f"SELECT {selected} FROM log")
        path = stored(asked, rows, columns)
    except library.exceptions.DeltaError as error:
        raise DpformerError(f"version {table.version()} of {asked.url} cannot be read: {first_line(error)}") from None
    return Brought(path, replace(asked.reading, snapshot=None), TITLE, str(table.version()))


def state(url: Url) -> object:
    """The table and its current version."""
    table = _table(url, None)
    return [str(table.metadata().id), table.version()]


def is_table(path: Path) -> bool:
    """Whether a path is the folder of a table."""
    return (path / "_delta_log").is_dir()


SOURCES = (Source((), bring, state, is_table),)


def _table(url: Url, version: int | None) -> Any:
    library, which = _library(), "" if version is None else f"version {version} of "
    options = {key: value for key, value in os.environ.items() if key.startswith(("AWS_", "AZURE_", "GOOGLE_"))}
    try:
        return library.DeltaTable(str(url), version=version, storage_options=options if url.scheme else None)
    except (library.exceptions.DeltaError, OSError, ValueError) as error:
        more = "" if version is None else "; it may have been removed (VACUUM), or not be there yet"
        raise DpformerError(f"{which}{url} cannot be read as a Delta table{more}: {first_line(error)}") from None


def _library() -> Any:
    try:
        import deltalake
        import deltalake.exceptions
    except ImportError:
        raise MissingExtra("deltalake", "delta") from None
    return deltalake
