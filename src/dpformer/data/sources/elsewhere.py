"""The table of sources: the URL schemes that a log can have, and how each is copied to this machine.

A source copies the log, or the requested part of it, to a private folder while it is read; from there it is read like
any other. So every format, filter and sentence is the same for all sources, and a log that changes meanwhile is read
in one state. An external source is an entry point of the group `dpformer.sources`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from dpformer.data.sources.urls import Url, url_of
from dpformer.errors import DpformerError

if TYPE_CHECKING:
    from dpformer.data.reading import Reading

_MODULES = ("object_stores", "databases", "delta", "iceberg", "hub")


@dataclass(frozen=True)
class Asked:
    """A request to a source.

    Attributes:
        url: the URL of the log.
        choose: names of all columns → those that are needed, by which rows without an order are ordered.
        reading: the reading options.
        folder: private folder for the copy; it exists.
    """

    url: Url
    choose: Callable[[list[str]], list[str]]
    reading: Reading
    folder: Path


@dataclass(frozen=True)
class Brought:
    """A log copied to this machine.

    Attributes:
        path: path of the files.
        reading: their reading options.
        title: title of the format, if that of the files is meaningless.
        snapshot: version of the log, if versions are numbered.
    """

    path: Path
    reading: Reading
    title: str | None = None
    snapshot: str | None = None


@dataclass(frozen=True)
class Source:
    """A kind of source.

    Attributes:
        schemes: schemes of its URLs.
        bring: copies a log to this machine.
        state: a value that changes when the log does; None: unknown.
        is_table: whether a local path is a table of its format, which is more than files.
    """

    schemes: tuple[str, ...]
    bring: Callable[[Asked], Brought]
    state: Callable[[Url], object] | None = None
    is_table: Callable[[Path], bool] | None = None


def sources() -> dict[str, Source]:
    """All sources by scheme."""
    return {scheme: source for source in _all() for scheme in source.schemes}


def source_of(path: Path) -> tuple[Source, Url] | None:
    """The source of a log and its URL, or its path if it is a local table; None if it is local files."""
    url = url_of(path)
    if url is None:
        kind = table_format(path)
        return None if kind is None else (kind, Url(str(path)))
    found = sources().get(url.scheme)
    if found is None:
        known = ", ".join(f"{scheme}://" for scheme in sources())
        raise DpformerError(f"{url.scheme}:// is unknown: give a file, or a URL that starts with one of {known}")
    return found, url


def table_format(path: Path) -> Source | None:
    """The source that reads the table at a local path; None if there are only files."""
    try:
        return next((source for source in _all() if source.is_table is not None and source.is_table(path)), None)
    except (OSError, ValueError):  # no path at all
        return None


def state_of(source: Source, url: Url) -> object:
    """A value on which a cache of the log depends."""
    if source.state is None:
        raise DpformerError(f"changes of {url} cannot be detected, so it cannot be cached: omit --cache")
    return source.state(url)


@cache
def _all() -> tuple[Source, ...]:
    modules = [importlib.import_module(f"dpformer.data.sources.{name}") for name in _MODULES]
    built_in = [source for module in modules for source in module.SOURCES]
    return (*built_in, *(entry.load() for entry in entry_points(group="dpformer.sources")))
