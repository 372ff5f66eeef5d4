"""Atomic writing of files; reading text of limited size; strict JSON.

Files may be untrusted: none is read completely before its size is known.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from dpformer.errors import DpformerError

MOST_BYTES = 2**22  # of JSON or TOML
MOST_METRICS = 2**30
MOST_LEDGER = 2**26  # about 100,000 runs


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; afterwards the file is on disk under its real name or, after an error, not there.

    An existing file is replaced atomically, so there is always an old or a new one.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DpformerError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def lock_file(file: IO[Any], *, wait: bool) -> None:
    """Lock an open file for this process until it is closed; OSError if another holds it and `wait` is False."""
    try:
        fcntl = import_module("fcntl")
    except ImportError:  # Windows
        msvcrt = import_module("msvcrt")
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file atomically; a private one is readable by its owner alone from the first byte."""
    with replacing(path) as part:
        if private:
            part.touch(mode=0o600)
        part.write_text(text, encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    """Sync a folder, after which a rename survives a power cut; not every system supports that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def regular(path: Path, most: int = MOST_BYTES) -> str:
    """Why a file is not read; empty for a regular file of limited size. Reading a named pipe would block."""
    try:
        found = path.stat()
    except OSError as error:
        return f"{path.name} is not here" if isinstance(error, FileNotFoundError) else f"{path.name}: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{path.name} is not a file"
    return f"{path.name} {_too_large(found, most)}" if _too_large(found, most) else ""


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The contents of a UTF-8 text file; one that is too large raises OSError without being read."""
    if problem := _too_large(path.stat(), most):
        raise OSError(f"it {problem}")
    return path.read_text(encoding="utf-8")


def _too_large(found: os.stat_result, most: int) -> str:
    return f"is larger than {most:,} bytes" if found.st_size > most else ""


def strict_json(text: str | bytes) -> Any:
    """Parsed JSON; a duplicate key in an object is a ValueError.

    Python keeps the last value, other readers the first, so a file could tell its checker one thing and others another.
    """
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)[:60]!r} occurs twice")
    return found
