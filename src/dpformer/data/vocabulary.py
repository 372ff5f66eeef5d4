"""The vocabulary: which items exist, as the model and everybody who gets it will see.

Which items occur in private data is itself private: a rare item in a released vocabulary gives away that somebody had
it. So there are three policies, and the privacy statement names the one used:

- `catalog`: a public file lists the items; the data has no influence.
- `dp`: the items are released from the data with differential privacy (`sparse_histogram`); the ledger holds the cost.
- `assumed-public`: the items that occur in the data; the guarantee does not cover which they are.
"""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dpformer.data.columns import COLUMN_NAMES, JSON_KEYS, listed, plain
from dpformer.data.engine import Connection, engine, text
from dpformer.data.engine import name as sql_name
from dpformer.data.fields import delimited, lines
from dpformer.data.files import files_of, unpacked
from dpformer.data.interactions import id_text
from dpformer.data.reading import DELIMITERS, Reading, format_of
from dpformer.data.tabular import parquet
from dpformer.errors import DpformerError

ITEM_NAMES = (*COLUMN_NAMES["item"], "id")
TITLE_NAMES = ("title", "name", "itemname", "movietitle", "producttitle")


@dataclass(frozen=True)
class Vocabulary:
    """Items: position i holds the user's own id of item i, and its title if a catalogue gives one."""

    ids: Sequence[str]
    titles: Sequence[str] | None = None
    policy: str = "assumed-public"

    def __post_init__(self) -> None:
        if self.policy not in ("catalog", "dp", "assumed-public"):
            raise ValueError(f"vocabulary policy {self.policy!r} is not one of catalog, dp, assumed-public")
        if len(self._numbers) != len(self.ids):
            raise ValueError("a vocabulary holds an id twice")
        if self.titles is not None and len(self.titles) != len(self.ids):
            raise ValueError(f"{len(self.titles)} titles for {len(self.ids)} items")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.ids)}

    def index(self, ids: Iterable[Any]) -> np.ndarray:
        """Item numbers of users' own ids; an unknown id is an error."""
        names = [id_text(name) for name in ids]
        unknown = [name for name in names if name not in self._numbers]
        if unknown:
            raise DpformerError(f"item {unknown[0]!r} is not in the vocabulary of {len(self):,} items")
        return np.array([self._numbers[name] for name in names], dtype=np.int64)

    def match(self, ids: Sequence[str]) -> np.ndarray:
        """Item numbers of ids, -1 for those not in the vocabulary."""
        return np.fromiter((self._numbers.get(name, -1) for name in ids), np.int64, len(ids))

    def title(self, item: int) -> str:
        """An item's title, or its id where there is none."""
        return (self.titles[item] if self.titles is not None else "") or self.ids[item]

    def to_json(self) -> str:
        """All of it as text, to be stored beside a model."""
        titles = None if self.titles is None else list(self.titles)
        return json.dumps({"policy": self.policy, "ids": list(self.ids), "titles": titles})

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Back from `to_json`."""
        try:
            fields = json.loads(text)
            ids, titles = fields["ids"], fields["titles"]
            if not all(isinstance(name, str) for name in chain(ids, titles or ())):
                raise ValueError("an id or title is not text")
            return cls(ids, titles, fields["policy"])
        except (ValueError, KeyError, TypeError) as error:
            raise DpformerError(f"this is not a stored vocabulary: {error}") from None


def canonical_order(ids: Sequence[str]) -> np.ndarray:
    """The order in which released items are numbered: a function of the *set* of ids alone.

    Order of appearance in the data would say who came first. Whole numbers are ordered by value, before other text.
    """

    def key(number: int) -> tuple[bool, int, str, str]:
        name = ids[number]
        if name.isascii() and name.isdecimal():
            digits = name.lstrip("0")
            return (False, len(digits), digits, name)
        return (True, 0, name, name)

    return np.array(sorted(range(len(ids)), key=key), dtype=np.int64)


def read_catalog(path: str | Path, *, item_column: str | None = None, title_column: str | None = None) -> Vocabulary:
    """Reads a public catalogue: item ids, with titles if the file has them. Formats as for logs.

    Without a header the first column is the id and the second, if any, the title. A file that is not UTF-8 is Latin-1:
    no user wrote it, so that its bytes may decide.
    """
    path = Path(path)
    with TemporaryDirectory() as folder, engine(what=str(path)) as connection:
        select = _catalog(connection, path, Path(folder), item_column, title_column)
        rows = connection.execute(select).fetchall()
    titles: dict[str, str] = {}
    for number, (raw, title) in enumerate(rows, start=1):
        try:
            name = id_text(raw)
        except ValueError as error:
            raise DpformerError(f"{path}, item {number} has no item_id: {error}") from None
        if name in titles:
            raise DpformerError(f"{path}, item {number}: item {name!r} is in the catalogue twice")
        titles[name] = (title or "").strip()
    if not titles:
        raise DpformerError(f"{path} holds no items")
    return Vocabulary(list(titles), list(titles.values()) if any(titles.values()) else None, "catalog")


def _catalog(connection: Connection, path: Path, folder: Path, item: str | None, title: str | None) -> str:
    """SQL of (id, title)."""
    (file,) = files_of(path)[:1]
    kind = format_of(path, Reading())
    if kind in ("duckdb", "sqlite"):
        raise DpformerError(f"{path} is a database: give the catalogue as CSV, JSON lines or Parquet")
    if kind == "parquet":
        select = parquet([file])
        columns = [str(row[0]) for row in connection.execute(f"DESCRIBE {select}").fetchall()]
        found = [_column(columns, item, ITEM_NAMES, path), _column(columns, title, TITLE_NAMES, path)]
        cells = [f"CAST({'NULL' if column is None else sql_name(column)} AS VARCHAR)" for column in found]
        return f"SELECT {cells[0]}, {cells[1]} FROM ({_required(select, found[0], columns, path)})"
    utf8 = file.read_bytes()
    try:
        utf8.decode("utf-8")
    except UnicodeDecodeError:
        (file,) = unpacked([file], Reading(encoding="latin-1"), folder)
    rows = f"{lines([file], 0)} WHERE line IS NOT NULL AND trim(line) <> ''"
    if kind == "jsonl":
        return _json_catalog(rows, item, title)
    if kind == "lines":  # `id words of the title`: as many as it takes
        return f"SELECT split_part(x, ' ', 1), x[strpos(x || ' ', ' ') + 1:] FROM (SELECT trim(line) AS x FROM {rows})"
    if kind == "movielens":
        return f"SELECT split_part(line, '::', 1), split_part(line, '::', 2) FROM {rows}"
    return _delimited_catalog(connection, rows, kind, item, title, path)


def _json_catalog(rows: str, item: str | None, title: str | None) -> str:
    keys = [(item,) if item else (*JSON_KEYS["item"], "id"), (title,) if title else ("title", "name", "item_name")]
    cells = ["coalesce(" + ", ".join(f"line ->> {text('$.' + json.dumps(key))}" for key in some) + ")" for some in keys]
    return f"SELECT {cells[0]}, {cells[1]} FROM (SELECT line FROM {rows})"


def _delimited_catalog(
    connection: Connection, rows: str, kind: str, item: str | None, title: str | None, path: Path
) -> str:
    first = connection.execute(f"SELECT line FROM {rows} LIMIT 1").fetchone()
    if first is None:
        raise DpformerError(f"{path} is empty")
    delimiter = "\t" if kind in ("tsv", "inter") else max(DELIMITERS, key=first[0].count)
    names = [field.strip().split(":")[0] for field in next(csv.reader([first[0]], delimiter=delimiter))]
    found, titled = _column(names, item, ITEM_NAMES, path), _column(names, title, TITLE_NAMES, path)
    if len(names) == 1 and found is None:
        return f"SELECT line, NULL FROM {rows}"
    _required("", found, names, path)
    assert found is not None
    fields = delimited(delimiter, len(names), quotes=kind != "inter")
    cell = "NULL" if titled is None else fields.field(names.index(titled))
    numbered = f"SELECT line, row_number() OVER () AS n FROM {rows}"
    inner = f"SELECT n, {fields.expression} AS s, line FROM ({numbered}) WHERE n > 1"
    wrong = connection.execute(f"SELECT n, line FROM ({inner}) WHERE ({fields.fault}) <> 0 LIMIT 1").fetchone()
    if wrong is not None:
        raise DpformerError(f"{path}, row {wrong[0]} has not the {len(names)} fields of the header: {wrong[1][:80]!r}")
    return f"SELECT {fields.field(names.index(found))}, {cell} FROM ({inner})"


def _column(names: list[str], chosen: str | None, known: tuple[str, ...], path: Path) -> str | None:
    if chosen is not None and chosen not in names:
        raise DpformerError(f"{path} has no column {chosen!r}; it has {listed(names)}")
    by_name = {plain(name): name for name in reversed(names)}
    return chosen or next((by_name[name] for name in known if name in by_name), None)


def _required(select: str, found: str | None, names: list[str], path: Path) -> str:
    if found is None:
        raise DpformerError(
            f"{path} has no header with item_id (its first columns are {', '.join(names[:5])}); "
            "a catalogue needs the columns item_id and, if there are titles, title"
        )
    return select
