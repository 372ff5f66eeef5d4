"""The public catalogue: which items exist, their titles, and their public attributes.

Formats: Parquet, JSON lines, CSV or TSV with a header, read by DuckDB; MovieLens `::` and plain `id title` lines. The
item's id and title are found by their column names; every other column becomes attributes:

- a list, or text with `|` in it, is several values: `Comedy|Romance`;
- numbers with fractions (prices) are binned into deciles; integers are values (years);
- lists of numbers of one length, at least four and not all integers, are vectors: items are attributes of the items
  near them (`vectors.py`);
- the words of the title count as attributes too, unless `title_words` is off;
- a value of a single item is dropped.

A catalogue must hold only public facts. Users' actions (tags, ratings, sales, popularity) are not public: the privacy
guarantee treats everything in this file as known to everyone.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpformer.data.attributes import WORDS, Attributes, Name
from dpformer.data.columns import COLUMN_NAMES, plain
from dpformer.data.interactions import id_text
from dpformer.data.readers.split_line import no_glob
from dpformer.data.vectors import near_by, vectors_of
from dpformer.data.vocabulary import Vocabulary
from dpformer.engines.duckdb_connection import connect
from dpformer.errors import DpformerError

ID_NAMES = (*COLUMN_NAMES["item"], "id")
TITLE_NAMES = ("title", "name", "itemname", "movietitle", "producttitle")
HEAD_BYTES = 1 << 16
CLASSES = 10
LONGEST = 100  # maximum length of a value, in characters


class Rows(NamedTuple):
    """A file as rows of fields."""

    columns: list[str]
    named: bool  # from a header; otherwise "1", "2", …
    rows: list[tuple[Any, ...]]


def read_catalog(
    path: str | Path, *, item_column: str | None = None, title_column: str | None = None, title_words: bool = True
) -> Vocabulary:
    """Read a public catalogue: ids of items, and titles and attributes if present.

    Without a header the first column is the id and the second, if any, the title.
    """
    path = Path(path)
    table = _read(path, item_column)
    place = _places(table, path, item_column, title_column)
    rows = [row for row in table.rows if any(field not in (None, "") for field in row)]
    ids = _ids(rows, place[0], path, start=2 if table.named else 1)
    titles = ["" if place[1] is None else str(row[place[1]] or "").strip() for row in rows]
    facts: list[list[Name]] = [[] for _ in rows]
    for number, column in enumerate(table.columns):
        if number not in place:
            for item, names in zip(facts, _column_facts(column, [row[number] for row in rows], ids), strict=True):
                item.extend(names)
    if title_words:
        for item, title in zip(facts, titles, strict=True):
            item.extend((WORDS, word) for word in re.findall(r"[^\W_]+", title.lower()))
    attributes = Attributes.of_items(facts)
    return Vocabulary(ids, titles if any(titles) else None, "catalog", attributes if len(attributes) else None)


def _ids(rows: Sequence[tuple[Any, ...]], place: int, path: Path, start: int) -> list[str]:
    ids: dict[str, None] = {}
    for number, row in enumerate(rows, start=start):
        try:
            name = id_text(row[place])
        except ValueError as error:
            raise DpformerError(f"{path}, row {number} has no item_id: {error}") from None
        if name in ids:
            raise DpformerError(f"{path}, row {number}: item {name!r} occurs twice in the catalogue")
        ids[name] = None
    if not ids:
        raise DpformerError(f"{path} holds no items")
    return list(ids)


def _column_facts(column: str, fields: Sequence[Any], ids: Sequence[str]) -> Iterable[list[Name]]:
    """The attributes from one column, one list per item."""
    listed = [_as_list(field) for field in fields]
    vectors = vectors_of(listed)
    if vectors is not None:
        return near_by(column, vectors, ids)
    return ([(column, value) for value in values] for values in _column_values(listed))


def _as_list(field: Any) -> Any:
    """A list that is written as text, as tables write lists into CSV; None if the field is empty; else unchanged."""
    if isinstance(field, str) and field.startswith("[") and field.endswith("]"):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(field)
    return None if isinstance(field, str) and not field else field


def _column_values(fields: Sequence[Any]) -> Iterator[list[str]]:
    """The values of one column, one list per item."""
    numbers = _fractions(fields)
    if numbers is None:
        yield from (list(_values(field)) for field in fields)
        return
    known = numbers[~np.isnan(numbers)]
    edges = np.unique(np.quantile(known, np.linspace(0, 1, CLASSES + 1)))
    classes = np.searchsorted(edges[1:-1], numbers, side="right")
    for number, chosen in zip(numbers, classes.tolist(), strict=True):
        high = edges[min(chosen + 1, len(edges) - 1)]
        yield [] if np.isnan(number) else [f"{edges[chosen]:g} to {high:g}"]


def _fractions(fields: Sequence[Any]) -> np.ndarray | None:
    """The fields as numbers, NaN if missing, provided that all are numbers and some are not integers."""
    try:
        numbers = np.array([np.nan if field in (None, "") else float(field) for field in fields])
    except (TypeError, ValueError):
        return None
    known = numbers[~np.isnan(numbers)]
    if not len(known) or not np.isfinite(known).all() or (known == np.floor(known)).all():
        return None
    return numbers


def _values(field: Any) -> Iterator[str]:
    if field is None or field != field:
        return
    if isinstance(field, dict):
        field = list(field.values())
    if isinstance(field, list | tuple | set):
        for part in field:
            yield from _values(part)
        return
    for part in str(field).split("|"):
        if value := part.strip()[:LONGEST]:
            yield value


def _places(table: Rows, path: Path, item_column: str | None, title_column: str | None) -> tuple[int, int | None]:
    """The columns of the id and of the title."""
    found = [_place(table, name, known, path) for name, known in ((item_column, ID_NAMES), (title_column, TITLE_NAMES))]
    if found[0] is None and not table.named:
        found = [0, 1 if len(table.columns) > 1 else None]
    if found[0] is None:
        raise DpformerError(
            f"{path} has no header with item_id (its first columns are {', '.join(table.columns[:5])}); "
            "a catalogue needs the columns item_id and, if there are titles, title"
        )
    return found[0], found[1]


def _place(table: Rows, wanted: str | None, known: Iterable[str], path: Path) -> int | None:
    if wanted is not None:
        if wanted not in table.columns:
            raise DpformerError(f"{path} has no column {wanted!r}; it has {', '.join(table.columns[:10])}")
        return table.columns.index(wanted)
    names = [_plain(column) for column in table.columns]
    return next((names.index(name) for name in known if name in names), None)


def _plain(name: str) -> str:
    return plain(name.split(":")[0])  # RecBole writes item_id:token


def _read(path: Path, item_column: str | None) -> Rows:
    head = _head(path)
    if head[:4] == b"PAR1" or path.suffix.lower() in (".parquet", ".pq"):
        return _query(path, "read_parquet(?)", True)
    if b"\0" in head:
        raise DpformerError(f"{path} is not a text file (it contains zero bytes); give CSV, TSV, JSON lines or Parquet")
    lines = head.decode("utf-8-sig", errors="replace").lstrip().splitlines()
    first = lines[0]
    if first.startswith("[") and path.suffix.lower() not in (".csv", ".tsv", ".txt"):
        raise DpformerError(f"{path} is a JSON array; give JSON lines: one object per line")
    if first.startswith("{") or path.suffix.lower() in (".jsonl", ".ndjson"):
        return _query(path, "read_json(?, format = 'newline_delimited', sample_size = -1)", True)
    if "::" in first:
        return _split(path, "::")
    delimiter = "\t" if path.suffix.lower() in (".tsv", ".item") else max("\t,;|", key=first.count)
    names = [_plain(name.strip('" ')) for name in first.split(delimiter)]
    named = any(name in ID_NAMES for name in names) or item_column in [n.strip('" ') for n in first.split(delimiter)]
    if not named and delimiter not in first:
        return _split(path, None)
    if not named:
        raise DpformerError(
            f"{path} has no header with item_id (its first columns are {', '.join(first.split(delimiter)[:5])}); "
            "a catalogue needs the columns item_id and, if there are titles, title"
        )
    options = f"delim = '{delimiter}', header = true, all_varchar = true, null_padding = true, sample_size = -1"
    return _query(path, f"read_csv(?, {options}, encoding = '{_encoding(path)}')", True)


def _split(path: Path, separator: str | None) -> Rows:
    """Lines without a header: fields between `::`, or an id and the words of a title."""
    text = path.read_bytes().decode("utf-8-sig" if _encoding(path) == "utf-8" else "latin-1")
    most = -1 if separator else 1
    rows = [tuple(part.strip() for part in line.split(separator, most)) for line in text.splitlines() if line.strip()]
    width = max(map(len, rows), default=1)
    return Rows([str(n + 1) for n in range(width)], False, [(*row, *[""] * (width - len(row))) for row in rows])


def _query(path: Path, source: str, named: bool) -> Rows:
    try:
        with connect(what=str(path)) as connection:
            result = connection.execute(f"SELECT * FROM {source}", [no_glob(path)])
            columns = [str(column[0]) for column in result.description]
            return Rows(columns, named, result.fetchall())
    except (UnicodeError, ValueError) as error:
        raise DpformerError(f"{path} cannot be read as a catalogue: {error}") from None


def _encoding(path: Path) -> str:
    try:
        path.read_bytes().decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        return "latin-1"


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            start = file.read(HEAD_BYTES)
    except FileNotFoundError:
        raise DpformerError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise DpformerError(f"{path} is a folder; give a file") from None
    except (OSError, ValueError) as error:
        raise DpformerError(f"{path} cannot be read: {error}") from None
    if not start.decode("utf-8-sig", errors="replace").strip():
        raise DpformerError(f"{path} is empty")
    return start
