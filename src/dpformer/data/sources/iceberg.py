"""Iceberg tables, by PyIceberg: the rows of one snapshot, without those that were deleted.

`iceberg://CATALOG/NAMESPACE.TABLE` asks a catalogue (`~/.pyiceberg.yaml`, or PYICEBERG_CATALOG__…) which state is the
current one. Without a catalogue a folder says so itself (`metadata/version-hint.text`), or a state is named by its
file, `….metadata.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpformer.data.sources.elsewhere import Asked, Brought, Source
from dpformer.data.sources.ordered import refuse_format, stored
from dpformer.data.sources.urls import Url
from dpformer.engines.duckdb_connection import first_line
from dpformer.errors import DpformerError, MissingExtra

TITLE = "Iceberg"


def bring(asked: Asked) -> Brought:
    """Copies the needed columns of a snapshot, by default of the current one."""
    refuse_format(asked, "an Iceberg table")
    wanted = asked.reading.snapshot
    if wanted is not None and not wanted.isdecimal():
        raise DpformerError(f"snapshot is {wanted!r}; give the number of a snapshot of the Iceberg table {asked.url}")
    with _sentences(asked.url):
        table = _table(asked.url)
        snapshot = table.current_snapshot() if wanted is None else table.snapshot_by_id(int(wanted))
        if snapshot is None:
            which = "no rows" if wanted is None else f"no snapshot {wanted} (it may have expired)"
            raise DpformerError(f"the Iceberg table {asked.url} has {which}")
        names = [field.name for field in table.schema().fields]
        columns = names if asked.reading.query is not None else asked.choose(names)
        scan = table.scan(selected_fields=tuple(columns), snapshot_id=snapshot.snapshot_id)
        path = stored(asked, scan.to_arrow_batch_reader(), columns)
    return Brought(path, replace(asked.reading, snapshot=None), TITLE, str(snapshot.snapshot_id))


def state(url: Url) -> object:
    """The table and its current snapshot."""
    with _sentences(url):
        table = _table(url)
        snapshot = table.current_snapshot()
        return [str(table.metadata.table_uuid), None if snapshot is None else snapshot.snapshot_id]


def is_table(path: Path) -> bool:
    """Whether a path is the folder of a table, or a state of it (`….metadata.json`)."""
    named = path.name.endswith(".metadata.json") and path.is_file()
    return named or next(path.glob("metadata/*.metadata.json"), None) is not None


SOURCES = (Source(("iceberg",), bring, state, is_table),)


def _table(url: Url) -> Any:
    try:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.table import StaticTable
    except ImportError:
        raise MissingExtra("pyiceberg", "iceberg") from None
    if url.scheme == "iceberg":
        return load_catalog(url.host).load_table(url.path)
    return StaticTable.from_metadata(str(url))


@contextmanager
def _sentences(url: Url) -> Iterator[None]:
    try:
        yield
    except DpformerError:
        raise
    except FileNotFoundError as error:
        if "version-hint" in str(error):
            raise DpformerError(
                f"{url} does not say which of its states is the current one: name the table of a catalogue "
                "(iceberg://CATALOG/NAMESPACE.TABLE), or a state (metadata/….metadata.json)"
            ) from None
        raise DpformerError(f"the Iceberg table {url} lacks a file: {first_line(error)}") from None
    except Exception as error:
        ours = not isinstance(error, (OSError, ValueError, NotImplementedError))
        if ours and not type(error).__module__.startswith(("pyiceberg", "requests", "sqlalchemy", "pyarrow")):
            raise
        raise DpformerError(f"the Iceberg table {url} cannot be read: {first_line(error)}") from None
