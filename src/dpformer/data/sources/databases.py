"""Tables and queries of a database: `postgresql://` and `mysql://`.

The columns that are needed are copied here, in one transaction that may only read, put in order (`ordered.py`), and
read like any other log. Sums are added up here, too: no database has a say in how they are rounded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from dpformer.data.sources.elsewhere import Asked, Brought, Source
from dpformer.data.sources.ordered import refuse_format, stored
from dpformer.data.sources.urls import Url
from dpformer.errors import DpformerError

TIMEOUT = 20  # seconds to connect
_MODULES = {"postgresql": "postgresql", "postgres": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
_UNREACHABLE = (
    "refused", "could not translate", "name or service", "timeout", "timed out", "no route", "unreachable",
    "can't connect", "not known",
)  # fmt: skip
_DENIED = ("authentication failed", "no password supplied", "access denied", "pg_hba.conf", "permission denied")


class Database(Protocol):
    """A connection in one transaction that may only read."""

    title: str
    advice: str  # where user and password come from
    failures: tuple[type[Exception], ...]  # what its library raises

    def __init__(self, url: Url) -> None: ...

    def open(self) -> None:
        """Connects."""

    def columns(self, query: str) -> list[str]:
        """Names of the columns of a query, of which no row is read."""

    def tables(self) -> list[str]:
        """Tables and views of the database, as a query names them."""

    def quoted(self, name: str) -> str:
        """A name in its SQL."""

    def rows(self, query: str) -> Any:
        """A query as an Arrow reader of batches."""

    def close(self) -> None:
        """Ends the transaction and the connection, if there is one."""


def bring(asked: Asked) -> Brought:
    """Copies what is needed of a table, or of a query."""
    reading, url = asked.reading, asked.url
    refuse_format(asked, "a database")
    with _opened(url) as database:
        query = reading.query or f"SELECT * FROM {_table(database, url, reading.table)}"
        query = query.strip().rstrip(";")
        wanted = asked.choose(database.columns(query))
        columns = ", ".join(database.quoted(column) for column in wanted)
        path = stored(asked, database.rows(f"SELECT {columns} FROM ({query}) AS log"), wanted)
        title = database.title
    return Brought(path, replace(reading, table=None, query=None), title)


SOURCES = (Source(tuple(_MODULES), bring),)


def _table(database: Database, url: Url, chosen: str | None) -> str:
    found = database.tables()
    if chosen is None and len(found) == 1:
        return found[0]
    if chosen is None:
        raise DpformerError(f"{url} has the tables {', '.join(found[:12]) or '(none)'}: name one with --table")
    return ".".join(database.quoted(part) for part in chosen.split("."))


@contextmanager
def _opened(url: Url) -> Iterator[Database]:
    """A database whose failures are one sentence each, in which no password stands."""
    if not url.path:
        raise DpformerError(f"{url} names no database: give {url.scheme}://user@host/database")
    module = importlib.import_module(f"dpformer.data.sources.{_MODULES[url.scheme]}")
    database: Database = module.Database(url)
    try:
        database.open()
        yield database
    except database.failures as error:
        raise DpformerError(_said(database, url, " ".join(str(error.args[-1]).split()))) from None
    finally:
        database.close()


def _said(database: Database, url: Url, details: str) -> str:
    lower = details.lower()
    if any(word in lower for word in _DENIED):
        return f"{url} may not be read with the user and password that are given ({database.advice}): {_short(details)}"
    if any(word in lower for word in _UNREACHABLE):
        return f"{url} cannot be reached within {TIMEOUT} s: are host and port right, and does {database.title} run?"
    return f"{url} cannot be read: {_short(details)}"


def _short(details: str) -> str:
    """What the server said, without the query that stands behind it."""
    for start in ("Failed to connect: ", "ERROR: ", "FATAL: "):
        details = details.partition(start)[2] or details
    return details.partition(" LINE 1:")[0].partition(" Query was:")[0].strip()[:200]
