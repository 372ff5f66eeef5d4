"""The files of a log: one, a folder, a glob, standard input; what DuckDB cannot open is unpacked first."""

import bz2
import codecs
import glob
import gzip
import io
import lzma
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dpformer.data.reading import Reading
from dpformer.errors import DpformerError

BLOCK = 1 << 20
_OPENERS = {".xz": lzma.open, ".bz2": bz2.open, ".gz": gzip.open}
_PACKED = {b"\x1f\x8b": "gzip -dc", b"\x28\xb5\x2f\xfd": "zstd -dc", b"\xfd7zXZ\0": "xz -dc", b"BZh": "bzip2 -dc"}
_TABLES = {"Delta Lake": "_delta_log", "Apache Hudi": ".hoodie", "Apache Iceberg": "metadata/*.metadata.json"}
NO_TABLE = (
    "is part of a table of {kind}: its files hold rows that were deleted from it, so they are not read as they are; "
    "name the table itself"
)
NO_HUDI = " (Apache Hudi is not read: write its current rows to Parquet files first)"
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def files_of(path: Path) -> list[Path]:
    """The files that a path matches, sorted by name; hidden ones and `_SUCCESS` are ignored."""
    if path.name == "-":
        return [path]
    try:
        if path.is_dir():
            found = [
                file
                for file in sorted(path.rglob("*"))
                if file.is_file() and not any(part[0] in "._" for part in file.relative_to(path).parts)
            ]
            if not found:
                raise DpformerError(f"{path} contains no files")
            return _no_table(found)
        if not path.exists():
            found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
            if not found:
                raise DpformerError(f"{path} does not exist")
            return _no_table(found)
    except (OSError, ValueError) as error:
        raise DpformerError(f"{path} cannot be read: {error}") from None
    return _no_table([path])


def _no_table(files: list[Path]) -> list[Path]:
    """Refuse files that belong to a table: only its log knows which of their rows are current."""
    parents = {file.parent.resolve() for file in files} | {file.resolve().parent for file in files if file.is_symlink()}
    folders = {folder for parent in parents for folder in (parent, *parent.parents)}
    for folder in sorted(folders):
        kind = next((kind for kind, mark in _TABLES.items() if any(folder.glob(mark))), None)
        if kind is not None:
            raise DpformerError(f"{folder} {no_table(kind)}")
    return files


def no_table(kind: str) -> str:
    """Why files of a table are not read one by one."""
    return NO_TABLE.format(kind=kind) + (NO_HUDI if "Hudi" in kind else "")


def unpacked(files: list[Path], reading: Reading, folder: Path) -> list[Path]:
    """The files as UTF-8 that DuckDB can open: plain, .gz or .zst. Others are copied into the private folder."""
    return [_unpacked(file, reading, folder / str(number)) for number, file in enumerate(files)]


def _unpacked(path: Path, reading: Reading, folder: Path) -> Path:
    suffix = path.suffix.lower()
    encoding = _encoding(reading.encoding)
    if path.name != "-":
        _refuse_wide(path, encoding)
        if encoding == "utf-8" and suffix not in (".xz", ".bz2"):
            return path
    if suffix == ".zst":
        raise DpformerError(f"{path} is zstd in {reading.encoding}: unpack it first (zstd -d)")
    folder.mkdir(parents=True)
    copy = folder / "rows"
    try:
        with _opened(path, suffix) as packed, copy.open("wb") as out:
            if encoding == "utf-8":
                shutil.copyfileobj(packed, out, BLOCK)
            else:
                _transcode(packed, out, encoding)
    except (UnicodeError, EOFError, lzma.LZMAError, OSError) as error:
        raise DpformerError(f"{path} cannot be read as {encoding}: {error}") from None
    return copy


@contextmanager
def _opened(path: Path, suffix: str) -> Iterator[IO[bytes]]:
    if path.name == "-":
        start = sys.stdin.buffer.peek(8) if isinstance(sys.stdin.buffer, io.BufferedReader) else b""
        packer = next((command for magic, command in _PACKED.items() if start.startswith(magic)), None)
        if packer is not None:
            raise DpformerError(f"standard input is packed: unpack it first (… | {packer} | dpformer … -)")
        yield sys.stdin.buffer
        return
    opener: Any = _OPENERS.get(suffix, open)
    with opener(path, "rb") as file:
        yield file


def _transcode(packed: IO[bytes], out: IO[bytes], encoding: str) -> None:
    decoder = codecs.getincrementaldecoder(encoding)()
    while block := packed.read(BLOCK):
        out.write(decoder.decode(block).encode("utf-8"))
    out.write(decoder.decode(b"", final=True).encode("utf-8"))


def _encoding(name: str) -> str:
    try:
        found = codecs.lookup(name).name
        codecs.getincrementaldecoder(found)().decode(b"")
    except (LookupError, AttributeError, TypeError):
        raise DpformerError(f"encoding is {name!r}; give utf-8, utf-16, latin-1 or another that Python knows") from None
    return "utf-8" if found == "utf-8-sig" else found


def _refuse_wide(path: Path, encoding: str) -> None:
    """A UTF-16 byte order mark is not conclusive (it may be one row's id), so UTF-16 must be declared."""
    with path.open("rb") as file:
        start = file.read(2)
    if start in _WIDE and encoding == "utf-8":
        raise DpformerError(f"{path} seems to be UTF-16: give --encoding utf-16")
