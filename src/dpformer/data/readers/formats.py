"""The table of formats: name, suffixes, reader. `--format`, file name recognition and the readers come from it.

A format is one file in this folder with a tuple `FORMATS`; an external one is an entry point of the group
`dpformer.formats`, or is registered:

    register(Format("logfmt", "logfmt", (".logfmt",), read))
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from dpformer.data.columns import Columns
from dpformer.data.filters import Filters
from dpformer.data.readers.relation import Relation, Wanted
from dpformer.data.sources.elsewhere import Asked, Brought, Source, source_of
from dpformer.data.sources.files import files_of
from dpformer.data.sources.ordered import needed
from dpformer.data.sources.urls import Url, called
from dpformer.engines.duckdb_connection import Connection
from dpformer.errors import DpformerError

if TYPE_CHECKING:
    from dpformer.data.reading import Reading

COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


@dataclass(frozen=True)
class Given:
    """The arguments of a reader.

    Attributes:
        connection: the DuckDB that will run the SQL.
        files: the files to read, all of one format.
        wanted: the request.
        folder: private folder for unpacked files; it need not exist.
        together: whether the files are a folder or glob, so that folders such as `day=7` are columns.
    """

    connection: Connection
    files: list[Path]
    wanted: Wanted
    folder: Path
    together: bool = False


@dataclass(frozen=True)
class Format:
    """A format of logs.

    Attributes:
        name: for `--format`.
        title: for messages.
        suffixes: file suffixes, in lower case.
        read: makes the relation for some files.
        magic: initial bytes of such a file, if no text file can start with them.
        tables: whether it has tables, so that `--table` and `--query` apply.
        select: makes SQL of the rows as they are, for texts; None: they are read as JSON lines or plain text.
    """

    name: str
    title: str
    suffixes: tuple[str, ...]
    read: Callable[[Given], Relation]
    magic: bytes = b""
    tables: bool = False
    select: Callable[[Given], str] | None = None


def formats() -> dict[str, Format]:
    """All formats by name, built-in ones first."""
    return {**_built_in(), **_registered}


def register(added: Format) -> None:
    """Add a format; its name and suffixes must be new."""
    for known in formats().values():
        if known.name == added.name or set(known.suffixes) & set(added.suffixes):
            raise ValueError(f"{added.name} has the name or a suffix of the format {known.name}")
    _registered[added.name] = added


def relation(
    connection: Connection, path: Path, columns: Columns, reading: Reading, filters: Filters, *, folder: Path
) -> Relation:
    """The relation for the log at a path.

    Args:
        connection: the DuckDB that will run the SQL.
        path: a file, folder, glob, table, database, `-` for standard input, or a URL.
        columns: names of columns, if they are not the usual ones.
        reading: other reading options.
        filters: which interactions to use.
        folder: private folder for unpacked files.
    """
    where, elsewhere = called(path), source_of(path)
    brought = None if elsewhere is None else _brought(elsewhere, columns, reading, filters, folder)
    if brought is not None:
        path, reading = brought.path, brought.reading
    if reading.snapshot is not None:
        raise DpformerError(f"--snapshot is for tables with numbered states (Delta, Iceberg), and {where} has none")
    files = files_of(path)
    found = {form.name: form for form in (format_of(file, reading.format) for file in files)}
    if len(found) > 1:
        raise DpformerError(f"{where} contains several formats ({', '.join(sorted(found))}): choose one with a glob")
    (form,) = found.values()
    wanted = Wanted(columns, reading, filters, where)
    if not form.tables and (reading.table is not None or reading.query is not None):
        raise DpformerError(f"--table and --query apply to databases and Parquet, but {wanted.where} is {form.title}")
    made = replace(form.read(Given(connection, files, wanted, folder, together=files != [path])), format=form.title)
    if brought is not None:
        made = replace(made, format=brought.title or form.title, snapshot=brought.snapshot)
    if filters.row_filter is not None:
        made = replace(made, event=filters.row_filter.event)
    if filters.row_filter is not None and not made.filtered:
        raise DpformerError(
            f"{filters.row_filter.option} needs named columns, but {wanted.where} ({form.title}) has none: omit it"
        )
    if filters.window is not None and made.time_column is None:
        raise DpformerError(f"--since and --until need times, but the rows of {wanted.where} are read in file order")
    if filters.gap is not None and made.time_column is None:
        raise DpformerError(f"--session-gap needs times, but the rows of {wanted.where} are read in file order")
    return made


def _brought(
    elsewhere: tuple[Source, Url], columns: Columns, reading: Reading, filters: Filters, folder: Path
) -> Brought:
    """A remote log, copied to this machine."""
    source, url = elsewhere
    folder = folder / "brought"
    folder.mkdir(parents=True)
    return source.bring(Asked(url, partial(_needed, columns, reading, filters, str(url)), reading, folder))


def _needed(columns: Columns, reading: Reading, filters: Filters, where: str, names: list[str]) -> list[str]:
    return needed(names, columns, reading, filters, where)


def format_of(path: Path, declared: str | None) -> Format:
    """The format of a file: as declared by name, or by its magic bytes, or by its name."""
    known = formats()
    if declared is not None:
        return known[declared]
    if path.name != "-" and path.is_file():
        with path.open("rb") as file:
            start = file.read(16)
        found = next((form for form in known.values() if form.magic and start.startswith(form.magic)), None)
        if found is not None:
            return found
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    found = next((form for form in known.values() if suffixes and suffixes[-1] in form.suffixes), None)
    if found is not None:
        return found
    raise DpformerError(
        f"the format of {called(path)} cannot be inferred from its name: give --format, one of {', '.join(known)}"
    )


def same_format(path: Path, other: Path | None, other_format: str | None) -> bool:
    """Whether a log has the format of another one, which need not exist; True if its name does not tell."""
    formats_of: list[Format | None] = []
    for file, declared in ((path, None), (other or Path("-"), other_format)):
        try:
            first = files_of(file)[0] if file.exists() else file
            formats_of.append(format_of(first, declared))
        except DpformerError:
            formats_of.append(None)
    return formats_of[0] is None or formats_of[0] == formats_of[1]


_registered: dict[str, Format] = {}


@cache
def _built_in() -> dict[str, Format]:
    package = importlib.import_module("dpformer.data.readers")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    found = [form for module in modules for form in getattr(module, "FORMATS", ())]
    found += [entry.load() for entry in entry_points(group="dpformer.formats")]
    return {form.name: form for form in found}
