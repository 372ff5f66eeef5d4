"""Interactions: who met which item when, read from any of the formats into three arrays of numbers.

Ids may be of any type; inside they are text (`7` and `"7"` are one id) and arrays hold their codes. A row costs 16
bytes whatever else the file holds, so a file may be larger than memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.tables import Table, is_parquet, open_table, plain
from dpformer.errors import DpformerError

BLOCK = 1 << 10  # rows held as Python objects at a time: few enough for the cache of a processor

# In order of preference; compared without case and punctuation.
COLUMN_NAMES = {
    "user": ("userid", "user", "uid", "customerid", "reviewerid"),
    "item": ("itemid", "item", "iid", "movieid", "productid", "parentasin", "asin", "bookid", "trackid"),
    "timestamp": ("timestamp", "time", "ts", "unixreviewtime"),
    "rating": ("rating", "stars", "overall", "score"),
}
# What a file without a header means, by its number of columns: SASRec's and MovieLens' own files.
POSITIONS = {2: ("user", "item"), 4: ("user", "item", "rating", "timestamp")}


@dataclass(frozen=True)
class Interactions:
    """A log: row r says that user `user_ids[users[r]]` met item `item_ids[items[r]]` at `timestamps[r]`.

    Rows are in file order. Without timestamps file order is the order of time.
    """

    users: np.ndarray  # (rows,) int32
    items: np.ndarray  # (rows,) int32
    user_ids: Sequence[str]
    item_ids: Sequence[str]
    timestamps: np.ndarray | None = None  # (rows,) int64 or float64, finite
    ratings: np.ndarray | None = None  # (rows,) float64
    format: str = "arrays"

    def __len__(self) -> int:
        return len(self.users)

    def keep(self, rows: np.ndarray) -> "Interactions":
        """The rows of a boolean mask; codes keep their meaning."""
        if rows.all():
            return self
        return replace(
            self,
            users=self.users[rows],
            items=self.items[rows],
            timestamps=None if self.timestamps is None else self.timestamps[rows],
            ratings=None if self.ratings is None else self.ratings[rows],
        )


@dataclass(frozen=True)
class Columns:
    """Names of the columns; None: recognised by their usual names (`user_id`, `item_id`, `timestamp`, `rating`)."""

    user: str | None = None
    item: str | None = None
    timestamp: str | None = None
    rating: str | None = None

    def known_names(self) -> frozenset[str]:
        """What makes a first row a header: a usual name, or one given here (but for a position)."""
        chosen = {name for name in (self.user, self.item, self.timestamp, self.rating) if name}
        return frozenset(chain(*COLUMN_NAMES.values())) | {name for name in chosen if not name.isdigit()}


class Codes(dict[Any, int]):
    """Numbers ids in the order they appear: `codes[id]` is the code, `names[code]` the id as text."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._code_of_name: dict[str, int] = {}

    def __missing__(self, raw: Any) -> int:
        name = id_text(raw)
        code = self._code_of_name.setdefault(name, len(self.names))
        if code == len(self.names):
            self.names.append(name)
        self[raw] = code
        return code


def id_text(raw: Any) -> str:
    """An id as text, spaces around it removed. ValueError when there is none."""
    if raw is None or raw != raw or isinstance(raw, list | dict):
        raise ValueError(f"{raw!r} is not an id")
    if isinstance(raw, float) and raw.is_integer():
        raw = int(raw)  # a table with gaps makes whole numbers floats
    name = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else str(raw)
    name = name.strip()
    if not name:
        raise ValueError("an id is empty")
    if "\0" in name or "\n" in name or "\r" in name:
        raise ValueError(f"the id {name[:40]!r} holds a line break or a zero byte (an unclosed quote?)")
    return name


def read(path: str | Path, columns: Columns | None = None, *, ratings: bool = False) -> Interactions:
    """Reads a log; the format is recognised.

    Args:
        path: CSV, TSV, JSON lines, RecBole `.inter`, MovieLens `::`, plain `user item` lines, or Parquet.
        columns: names of columns where they are not the usual ones; in a file without a header, positions from "1".
        ratings: also read the rating column, for a filter.
    """
    path, columns = Path(path), columns or Columns()
    if is_parquet(path):
        from dpformer.data.parquet import open_parquet

        with open_parquet(path, columns.known_names()) as table:
            return read_table(table, columns, ratings, path)
    try:
        with open_table(path, "utf-8-sig", columns.known_names()) as table:
            return read_table(table, columns, ratings, path)
    except UnicodeDecodeError:  # older files (MovieLens) are in latin-1, in which all bytes are valid
        with open_table(path, "latin-1", columns.known_names()) as table:
            return read_table(table, columns, ratings, path)


def read_table(table: Table, columns: Columns, ratings: bool, path: Path) -> Interactions:
    """The interactions in the rows of an open table, in file order."""
    keys = resolve(table, columns, ratings, path)
    users, items = Codes(), Codes()
    parts: dict[str, list[np.ndarray]] = {role: [] for role in keys}
    start = table.start
    while block := list(islice(table.rows, BLOCK)):
        block = check_shape(block, table, keys, start, path)
        for role, key in keys.items():
            values = list(map(itemgetter(key), block))
            if role in ("user", "item"):
                parts[role].append(_encode(values, users if role == "user" else items, role, start, path))
            else:
                parts[role].append(numbers(values, role, start, path))
        start += len(block)
    if start == table.start:
        raise DpformerError(f"{path} has no rows")
    return Interactions(
        users=np.concatenate(parts["user"]),
        items=np.concatenate(parts["item"]),
        user_ids=users.names,
        item_ids=items.names,
        timestamps=np.concatenate(parts["timestamp"]) if "timestamp" in parts else None,
        ratings=np.concatenate(parts["rating"]) if "rating" in parts else None,
        format=table.format,
    )


def resolve(table: Table, columns: Columns, ratings: bool, path: Path) -> dict[str, Any]:
    """Finds the columns: role → key into a row."""
    roles = ("user", "item", "timestamp", "rating") if ratings else ("user", "item", "timestamp")
    positions = () if table.named else _positions(table, path, columns)
    found: dict[str, Any] = {}
    for role in roles:
        key = resolve_column(table, getattr(columns, role), COLUMN_NAMES[role], path)
        if key is None and role in positions:
            key = positions.index(role)
        if key is not None:
            found[role] = key
    for role in ("user", "item", "rating") if ratings else ("user", "item"):
        if role not in found:
            name = role if role == "rating" else f"{role}_id"
            raise DpformerError(
                f"{path} has no column {name!r} (it has {_listed(table)}); name it with --{role}-column"
            )
    return found


def resolve_column(table: Table, chosen: str | None, usual_names: tuple[str, ...], path: Path) -> Any:
    """The key of one column: the chosen one, or the first of its usual names that the table has, or None."""
    if chosen is not None:
        if chosen not in table.keys:
            raise DpformerError(f"{path} has no column {chosen!r}; it has {_listed(table)}")
        return table.keys[chosen]
    named = {plain(name): key for name, key in reversed(table.keys.items())} if table.named else {}
    return next((named[name] for name in usual_names if name in named), None)


def _positions(table: Table, path: Path, columns: Columns) -> tuple[str, ...]:
    if columns.user and columns.item:
        return ()
    width = len(table.keys)
    positions = POSITIONS.get(width, ())
    # A header of unknown names must not be taken for a user: where one is usual, the row has to look like data.
    numeric = [_is_number(field) for field in table.first]
    like_data = table.format in ("plain lines", "MovieLens ::") or (all(numeric) if width == 2 else all(numeric[2:]))
    if not positions or not like_data:
        raise DpformerError(
            f"{path} has no header with user_id and item_id (its first row is {_shown(table.first)}); name the columns "
            "with --user-column and --item-column (a name, or a position from 1 if there is no header)"
        )
    return positions


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def check_shape(block: list[Any], table: Table, keys: dict[str, Any], start: int, path: Path) -> list[Any]:
    """The rows of a block, lines of spaces left out; every row has the columns that are read."""
    if isinstance(block[0], dict):
        for key in keys.values():
            bad = next((row for row, fields in enumerate(block) if key not in fields), None)
            if bad is not None:
                raise DpformerError(f"{path}, row {start + bad} has no {key!r}")
        return block
    width = len(table.keys)
    if set(map(len, block)) == {width}:
        return block
    block = [row for row in block if "".join(row).strip() or len(row) > 1]
    if not set(map(len, block)) <= {width}:
        bad = next(row for row, fields in enumerate(block) if len(fields) != width)
        raise DpformerError(
            f"{path}, row {start + bad} has {len(block[bad])} fields where the first has {width}: {_shown(block[bad])}"
        )
    return block


def _encode(values: list[Any], codes: Codes, role: str, start: int, path: Path) -> np.ndarray:
    try:
        return np.fromiter(map(codes.__getitem__, values), np.int32, len(values))
    except (ValueError, TypeError):  # TypeError: a list is no key
        for row, value in enumerate(values):
            try:
                id_text(value)
            except ValueError as error:
                raise DpformerError(f"{path}, row {start + row} has no {role}_id: {error}") from None
        raise


def numbers(values: list[Any], role: str, start: int, path: Path) -> np.ndarray:
    """Finite numbers: whole ones exactly in int64 (nanoseconds do not fit a float), else float64."""
    for kind, dtype in ((int, np.int64), (float, np.float64)):
        try:
            if kind is int and not set(map(type, values)) <= {int, str}:
                continue  # int() would cut the fraction off a float
            array = np.fromiter(map(kind, values), dtype, len(values))
        except (ValueError, TypeError, OverflowError):
            continue
        if np.isfinite(array).all():
            return array
    for row, value in enumerate(values):
        try:
            good = bool(np.isfinite(float(value)))
        except (ValueError, TypeError, OverflowError):
            good = False
        if not good:
            fix = "; give seconds since 1970" if role == "timestamp" else ""
            raise DpformerError(f"{path}, row {start + row}: the {role} {_shown([value])} is not a finite number{fix}")
    raise AssertionError("unreachable: some value is not a finite number")


def _listed(table: Table) -> str:
    names = list(table.keys)
    shown = ", ".join(name[:40] for name in names[:12]) + (", …" if len(names) > 12 else "")
    return shown if table.named else f"no header and {len(names)} columns"


def _shown(fields: Any) -> str:
    text = ", ".join(str(field) for field in list(fields)[:8])
    return repr(text if len(text) <= 80 else text[:80] + "…")
