"""Writing files so that a reader, or a crash, never meets half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
