"""An append-only file: SQLite, in which each entry holds the hash of the previous one.

    entries   number 0, 1, 2, …; kind; body (JSON); previous, the hash of the entry before; hash of all of these
    head      number and hash of the last entry

Editing, dropping or moving an entry, or cutting off the last ones, breaks the chain, and the file is refused. Someone
who rewrites the whole file can make a consistent chain; that is found by comparing it with the runs, whose statements
hold number and hash of their own entry (`ledger_file.check_runs`).

Processes are serialised by SQLite's lock, and an entry is written whole or not at all, even if the process dies. The
lock needs a file system that supports locks: a local disk, or a suitable network file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dpformer.errors import DpformerError
from dpformer.files import MOST_LEDGER, strict_json

APPLICATION = 0x6470666C  # "dpfl", in the header of the file
FORMAT = 1
MAGIC = b"SQLite format 3\0"
WAIT = 600.0  # seconds for another process to finish; it may be composing thousands of events
NOTHING = "0" * 64  # before the first entry
TABLES = {
    "entries": (
        "CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, "
        "previous TEXT NOT NULL, hash TEXT NOT NULL)"
    ),
    "head": "CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL, hash TEXT NOT NULL)",
}
Draft = tuple[str, dict[str, Any]]  # kind and body of a new entry


@dataclass(frozen=True)
class Entry:
    """One entry, as written."""

    number: int
    kind: str
    body: dict[str, Any]
    hash: str


class Chain:
    """The entries of an open file; `append` adds one if the file was opened for writing."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.entries: tuple[Entry, ...] = tuple(_checked(connection))

    def append(self, kind: str, body: dict[str, Any]) -> Entry:
        """Append an entry; it is on disk once `opened` ends without an error."""
        last = self.entries[-1] if self.entries else None
        number, previous = len(self.entries), NOTHING if last is None else last.hash
        salted = {**body, "salt": os.urandom(16).hex()}  # so that a published hash reveals nothing about its entry
        text = json.dumps(salted, sort_keys=True, ensure_ascii=False, allow_nan=False)
        entry = Entry(number, kind, salted, _hash(number, kind, text, previous))
        values = (number, kind, text, previous, entry.hash)
        self._connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", values)
        self._connection.execute("INSERT OR REPLACE INTO head VALUES (1, ?, ?)", (number, entry.hash))
        self.entries = (*self.entries, entry)
        return entry


def make(path: Path, drafts: Sequence[Draft], *, replace: bool = False) -> None:
    """Create a file with these entries, atomically; an existing one is refused, or replaced atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if not replace:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        with closing(_connection(part, create=True)) as connection:
            for table in TABLES.values():
                connection.execute(table)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute("BEGIN IMMEDIATE")
            chain = Chain(connection)
            for kind, body in drafts:
                chain.append(kind, body)
            connection.execute("COMMIT")
        os.replace(part, path)
    except FileExistsError:
        raise DpformerError(f"{path} already exists, and its budget cannot be changed") from None
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DpformerError(f"{path} cannot be written: {reason}") from None
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def opened(path: Path, *, write: bool = False) -> Iterator[Chain]:
    """Open and check a chain. For writing it holds the lock until the end, and an error leaves the file unchanged.

    A file that is not a chain, or whose chain is broken, raises DpformerError.
    """
    _refuse_others(path)
    try:
        with closing(_connection(path)) as connection:
            connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                chain = Chain(connection)
            except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is one too
                raise DpformerError(_unreadable(path, error)) from None
            yield chain
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        if "locked" in str(error) or "busy" in str(error):
            raise DpformerError(f"{path} has been in use by another process for {WAIT:g} seconds: try again") from None
        if "readonly" in str(error):
            raise DpformerError(f"{path} cannot be written: you have read-only access") from None
        raise DpformerError(_unreadable(path, error)) from None


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} is not a readable ledger: {' '.join(str(error).split())[:200]}"


def _connection(path: Path, *, create: bool = False) -> sqlite3.Connection:
    mode = "rwc" if create else "rw"  # rw falls back to read-only where the file is not writable
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=WAIT, isolation_level=None)
    connection.execute("PRAGMA trusted_schema = OFF")  # the file may be untrusted
    return connection


def _refuse_others(path: Path) -> None:
    """Refuse what is clearly not a chain, before SQLite sees it."""
    if not path.is_file():
        raise DpformerError(f"{path} is not a ledger: create one with dpformer ledger {path} --epsilon 10 --delta 1e-6")
    try:
        if path.stat().st_size > MOST_LEDGER:
            raise DpformerError(f"{path} is not a readable ledger: it is larger than {MOST_LEDGER:,} bytes")
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise DpformerError(f"{path} is not a readable ledger: {error.strerror}") from None
    if start.lstrip()[:1] == b"{":
        raise DpformerError(f"{path} is a ledger of an older version: run dpformer ledger convert {path}")
    if start != MAGIC:
        raise DpformerError(f"{path} is not a readable ledger: it is {'not a database' if start else 'empty'}")


def _checked(connection: sqlite3.Connection) -> Iterator[Entry]:
    """All entries, if the chain is intact; otherwise ValueError."""
    found = dict(connection.execute("SELECT name, sql FROM sqlite_master").fetchall())
    (application,), (version,) = (
        connection.execute(f"PRAGMA {n}").fetchone() for n in ("application_id", "user_version")
    )
    if found != TABLES or application != APPLICATION:
        raise ValueError("it has other tables")
    if version != FORMAT:
        raise ValueError(f"it has format {version}, this version reads {FORMAT}")
    last, previous = -1, NOTHING
    for number, kind, text, before, digest in connection.execute(
        "SELECT number, kind, body, previous, hash FROM entries ORDER BY number"
    ):
        if number != last + 1:
            raise ValueError(f"entry {last + 1} is missing: it was deleted")
        if before != previous or digest != _hash(number, kind, text, before):
            raise ValueError(f"entry {number} does not match its hash: it, or an earlier one, was edited")
        body = strict_json(text)
        if not isinstance(body, dict):
            raise ValueError(f"entry {number} is not a JSON object")
        yield Entry(number, kind, body, digest)
        last, previous = number, digest
    head = connection.execute("SELECT number, hash FROM head").fetchone()
    if (last, previous) != (head or (-1, NOTHING)):
        raise ValueError(
            f"its last entry is {last}, but {head[0] if head else 'none'} was written: entries were deleted"
        )


def _hash(number: int, kind: str, text: str, previous: str) -> str:
    return hashlib.sha256(f"dpformer ledger {FORMAT}\n{number}\n{kind}\n{previous}\n{text}".encode()).hexdigest()
