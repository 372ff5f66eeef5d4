"""Writing files so that a reader, or a crash, never meets half of one; reading JSON that says one thing only."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpformer.errors import DpformerError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to; afterwards it is on disk under its real name, or, after an error, nowhere.

    The file that stood there before is replaced in one step, so there is always an old or a new one.
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


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Writes a file whole or not at all; a private one is its owner's alone from the first byte on."""
    with replacing(path) as part:
        if private:
            part.touch(mode=0o600)
        part.write_text(text, encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    """A rename is safe from a power cut once its folder is on disk; not every system lets one ask for that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def strict_json(text: str | bytes) -> Any:
    """Parsed JSON; a key that stands twice in one object is a ValueError.

    Python keeps the last value, other readers the first: a file could tell its checker one thing and others another.
    """
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)[:60]!r} stands there twice")
    return found
