"""The table of sources: which URLs a log can have, and what brings it here.

A source copies the log, or what of it is asked for, to a private folder for as long as it is read; from there it is
read like any other. So every format, filter and sentence is the same for all sources, and a log that changes
meanwhile is read in one state. A source from outside is an entry point of the group `dpformer.sources`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from dpformer.data.columns import Columns
from dpformer.data.filters import Filters
from dpformer.data.reading import Reading
from dpformer.data.sources.urls import Url, url_of
from dpformer.errors import DpformerError

_MODULES = ("object_stores",)


@dataclass(frozen=True)
class Asked:
    """What is asked of a source.

    Attributes:
        url: of the log.
        columns, reading, filters: as they were declared.
        folder: private, for what is brought here; it exists.
    """

    url: Url
    columns: Columns
    reading: Reading
    filters: Filters
    folder: Path


@dataclass(frozen=True)
class Brought:
    """A log that is here now.

    Attributes:
        path: of the files.
        reading: how they are to be read.
        title: of the format, where that of the files says nothing.
        snapshot: which state of the log it is, if it has numbered ones.
    """

    path: Path
    reading: Reading
    title: str | None = None
    snapshot: str | None = None


@dataclass(frozen=True)
class Source:
    """A kind of place.

    Attributes:
        schemes: of its URLs.
        bring: brings a log here.
        state: something that is another when the log is; None: nothing tells.
    """

    schemes: tuple[str, ...]
    bring: Callable[[Asked], Brought]
    state: Callable[[Url], object] | None = None


def sources() -> dict[str, Source]:
    """All sources by scheme."""
    return {scheme: source for source in _all() for scheme in source.schemes}


def source_of(path: Path) -> tuple[Source, Url] | None:
    """The source of a log and its URL; None: it is a file here."""
    url = url_of(path)
    if url is None:
        return None
    found = sources().get(url.scheme)
    if found is None:
        known = ", ".join(f"{scheme}://" for scheme in sources())
        raise DpformerError(f"{url.scheme}:// is not known: give a file, or a URL that starts with one of {known}")
    return found, url


def state_of(source: Source, url: Url) -> object:
    """What a cache of the log depends on."""
    if source.state is None:
        raise DpformerError(f"nothing tells whether {url} has changed since it was kept: leave --cache out")
    return source.state(url)


@cache
def _all() -> tuple[Source, ...]:
    modules = [importlib.import_module(f"dpformer.data.sources.{name}") for name in _MODULES]
    built_in = [source for module in modules for source in module.SOURCES]
    return (*built_in, *(entry.load() for entry in entry_points(group="dpformer.sources")))
