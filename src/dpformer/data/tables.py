"""Text files as rows of fields: CSV, TSV, JSON lines, RecBole `.inter`, MovieLens `::`, plain `user item` lines.

The format is recognised from the first bytes, not trusted from the file name alone. Rows are streamed, so a file may be
larger than memory. Every failure is one sentence: a file is data from outside.
"""

import csv
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from dpformer.errors import DpformerError

HEAD_BYTES = 1 << 16
MAX_LINE = 1 << 20  # a line longer than this is no table row, and would be read into memory whole
_RECBOLE_FIELD = re.compile(r"(?P<name>[^:]+):(token|token_seq|float|float_seq)")


@dataclass(frozen=True)
class Table:
    """An open file: what its columns are called, and its rows.

    `keys` maps a column's name to what indexes a row: a position in a list of fields, or the name itself in a JSON
    object. `named` is False when the file has no header; then the names are the positions "1", "2", … as in `cut -f`.
    """

    format: str
    named: bool
    keys: dict[str, Any]
    first: Any  # the first row of data, also the first of `rows`
    rows: Iterator[Any]
    start: int = 1  # the number of the first row, where a header is row 1


def head(path: Path) -> bytes:
    """The first bytes of a file that exists, can be read and is not empty."""
    try:
        with path.open("rb") as file:
            start = file.read(HEAD_BYTES)
    except FileNotFoundError:
        raise DpformerError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise DpformerError(f"{path} is a folder; give the file in it") from None
    except (OSError, ValueError) as error:
        raise DpformerError(f"{path} cannot be read: {error}") from None
    if not start.strip():
        raise DpformerError(f"{path} is empty")
    return start


def is_parquet(path: Path) -> bool:
    """Whether the file says it is Parquet, by its magic bytes or by its name (then a torn one)."""
    return head(path)[:4] == b"PAR1" or path.suffix.lower() in (".parquet", ".pq")


def text_format(path: Path) -> str:
    """One of `jsonl`, `::`, `space`, or the one delimiter character of a CSV or TSV file."""
    start = head(path)
    if b"\0" in start:
        raise DpformerError(f"{path} is not a text file (it holds zero bytes); give CSV, TSV, JSON lines or Parquet")
    line = next(iter(start.decode("utf-8-sig", errors="replace").lstrip().splitlines()), "")
    suffix = path.suffix.lower()
    if line.startswith("{") or suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if line.startswith("["):
        raise DpformerError(f"{path} is a JSON array; give JSON lines: one object a line")
    if "::" in line:
        return "::"
    if suffix in (".tsv", ".inter"):
        return "\t"
    delimiter = max("\t,;|", key=line.count)
    return delimiter if delimiter in line else "space"


@contextmanager
def open_table(path: Path, encoding: str, known_names: frozenset[str]) -> Iterator[Table]:
    """Opens a text file; a first row that holds a name out of `known_names` is its header."""
    kind = text_format(path)
    try:
        with path.open(encoding=encoding) as file:
            lines = chain.from_iterable(_pieces(file, path))
            yield _objects(lines, path) if kind == "jsonl" else _fields(lines, kind, path, known_names)
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error}") from None
    except csv.Error as error:
        raise DpformerError(f"{path} is not well-formed CSV: {error}") from None


def plain(name: str) -> str:
    """A column's name without case and punctuation: `userId`, `user_id` and `User ID` are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _pieces(file: TextIO, path: Path) -> Iterator[StringIO]:
    """The file in pieces of whole lines: as fast as the file itself, and one endless line is not read whole."""
    rest = ""
    while piece := file.read(MAX_LINE):
        whole, newline, piece = (rest + piece).rpartition("\n")
        yield StringIO(whole + newline)
        rest = piece
        if len(rest) >= MAX_LINE:
            raise DpformerError(f"{path} has a line of more than {MAX_LINE:,} characters: it is not a table")
    yield StringIO(rest)


def _fields(lines: Iterator[str], kind: str, path: Path, known_names: frozenset[str]) -> Table:
    rows: Iterator[list[str]]
    if kind == "space":
        rows = filter(None, map(str.split, lines))
    elif kind == "::":
        rows = (line.rstrip("\r\n").split("::") for line in lines if not line.isspace())
    else:
        # RecBole writes its fields bare; everybody else quotes a field that holds the delimiter.
        bare = path.suffix.lower() == ".inter"
        parsed = csv.reader(lines, delimiter=kind, quoting=csv.QUOTE_NONE if bare else csv.QUOTE_MINIMAL, strict=True)
        rows = filter(None, parsed)
    first = next(rows, None)
    if first is None:
        raise DpformerError(f"{path} is empty")
    matches = [_RECBOLE_FIELD.fullmatch(field.strip()) for field in first]
    recbole = [match["name"] for match in matches if match]
    names = recbole if len(recbole) == len(first) else [field.strip() for field in first]
    name = {"space": "plain lines", "::": "MovieLens ::", "\t": "TSV"}.get(kind, "CSV")
    if names is recbole or any(field in known_names or plain(field) in known_names for field in names):
        twice = [field for place, field in enumerate(names) if field and field in names[:place]]
        if twice:
            raise DpformerError(f"{path} has two columns {twice[0]!r}: rename one")
        keys = {field: place for place, field in enumerate(names)}
        first = next(rows, None)
        if first is None:
            raise DpformerError(f"{path} has a header and no rows")
        return Table("RecBole" if names is recbole else name, True, keys, first, chain([first], rows), start=2)
    positions = {str(place + 1): place for place in range(len(first))}
    return Table(name, False, positions, first, chain([first], rows))


def _objects(lines: Iterator[str], path: Path) -> Table:
    def parse() -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DpformerError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DpformerError(f"{path}, line {number} is not a JSON object")
            yield row

    rows = parse()
    first = next(rows, None)
    if first is None:
        raise DpformerError(f"{path} is empty")
    return Table("JSON lines", True, {name: name for name in first}, first, chain([first], rows))
