"""Interactions in memory: who met which item when, as arrays; made of a data frame, or by hand.

Ids may be of any type; inside they are text (`7` and `"7"` are one id) and arrays hold their codes.
"""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpformer.data.columns import Columns, resolve
from dpformer.data.histories import Histories, Times
from dpformer.errors import DpformerError

SMALL = 2**53


@dataclass(frozen=True)
class Interactions:
    """A log: row r says that user `user_ids[users[r]]` met item `item_ids[items[r]]` at `timestamps[r]`.

    Without timestamps the order of rows is the order of time.
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

    def histories(self, *, min_rating: float | None = None, min_user_actions: int = 0) -> Histories:
        """One sequence a user; rows of the same time stay in their order (almost half of ML-1M's tie)."""
        read = {"users": len(self.user_ids), "items": len(self.item_ids), "interactions": len(self)}
        log = self
        if min_rating is not None:
            if log.ratings is None:
                raise DpformerError("min_rating is given and the data has no ratings")
            log = log.keep(log.ratings >= min_rating)
        log = log.keep(np.bincount(log.users, minlength=1)[log.users] >= min_user_actions)
        if not len(log):
            raise DpformerError(f"no interaction of {len(self):,} is left after the filters: lower them")
        timed = log.timestamps is not None
        keys = (log.users,) if log.timestamps is None else (log.timestamps, log.users)
        order = np.lexsort(keys)  # stable
        present, lengths = np.unique(log.users, return_counts=True)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        codes, times = log.items[order].astype(np.int32), Times()
        if log.timestamps is not None:
            times.add(codes, log.timestamps[order], np.zeros(len(codes)), offsets)
        facts = {"format": self.format, "read": read, "skipped": {}, **times.facts("timestamp" if timed else None)}
        return Histories([log.user_ids[user] for user in present.tolist()], log.item_ids, codes, offsets, facts)


class Codes:
    """Numbers ids in the order they appear: `codes[id]` is the code, `names[code]` the id as text.

    What is remembered is text and small whole numbers. True is equal to 1 for a dict, and one user's True must not
    become, or make, another's 1; and whole numbers beyond 2⁶¹ can be chosen so that a dict of them takes for ever.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._code_of_name: dict[str, int] = {}
        self._known: dict[str | int, int] = {}

    def __getitem__(self, raw: Any) -> int:
        if type(raw) is not str and not (type(raw) is int and -SMALL < raw < SMALL):
            return self._number(id_text(raw))
        code = self._known.get(raw)
        if code is None:
            code = self._known[raw] = self._number(id_text(raw))
        return code

    def _number(self, name: str) -> int:
        code = self._code_of_name.setdefault(name, len(self.names))
        if code == len(self.names):
            self.names.append(name)
        return code


def id_text(raw: Any) -> str:
    """An id as text, spaces around it removed. ValueError when there is none."""
    if raw is None or raw != raw or isinstance(raw, list | dict):
        raise ValueError(f"{raw!r} is not an id")
    if isinstance(raw, float | np.floating) and float(raw).is_integer():
        raw = int(raw)  # a table with gaps makes whole numbers floats
    name = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else str(raw)
    name = name.strip()
    if not name:
        raise ValueError("an id is empty")
    if "\0" in name or "\n" in name or "\r" in name:
        raise ValueError(f"the id {name[:40]!r} holds a line break or a zero byte (an unclosed quote?)")
    return name


def from_frame(
    frame: Any, columns: Columns | None = None, *, order: str = "time", ratings: bool = False
) -> Interactions:
    """The interactions of a data frame: pandas, Polars, an Arrow table, or a dict of sequences.

    Args:
        frame: its columns are named as those of a file.
        columns: names of columns where they are not the usual ones.
        order: "time": by the column of times; "file": its rows are in the order of time.
        ratings: also take the ratings, for a filter.
    """
    names = [str(column) for column in getattr(frame, "column_names", None) or _names(frame)]
    roles = resolve(names, columns or Columns(), rating=ratings, order=order, where="the frame")
    users, items = Codes(), Codes()
    return Interactions(
        users=_encoded(_values(frame, roles["user"]), users, "user"),
        items=_encoded(_values(frame, roles["item"]), items, "item"),
        user_ids=users.names,
        item_ids=items.names,
        timestamps=_times(_values(frame, roles["timestamp"])) if order == "time" else None,
        ratings=_ratings(_values(frame, roles["rating"])) if ratings else None,
        format="frame",
    )


def _names(frame: Any) -> Iterable[Any]:
    return frame.columns if hasattr(frame, "columns") else frame.keys()


def _values(frame: Any, column: str) -> list[Any]:
    values = frame[column]
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(values, method):
            return list(getattr(values, method)())
    return list(values)


def _encoded(values: list[Any], codes: Codes, role: str) -> np.ndarray:
    found = np.empty(len(values), dtype=np.int32)
    for row, value in enumerate(values):
        try:
            found[row] = codes[value]
        except (ValueError, TypeError) as error:  # TypeError: a list is no key
            raise DpformerError(f"row {row + 1} of the frame has no {role}_id: {error}") from None
    return found


def _times(values: list[Any]) -> np.ndarray:
    """Exact: numbers as they are, dates as nanoseconds since 1970; numbers and dates are not mixed."""
    numbers = [_number(value, row) for row, value in enumerate(values)]
    if len({isinstance(value, int | float) for value in values}) > 1:
        raise DpformerError("the frame has times that are numbers and times that are not: write them in one way")
    if all(isinstance(number, int) and abs(number) < 2**63 for number in numbers):
        return np.array(numbers, dtype=np.int64)
    exact = sorted(set(numbers))  # whole and fractional numbers compare exactly in Python: keep their order only
    places = {number: place for place, number in enumerate(exact)}
    return np.array([places[number] for number in numbers], dtype=np.int64)


def _number(value: Any, row: int) -> int | float:
    try:
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
        if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
            value = datetime.datetime(value.year, value.month, value.day)
        if isinstance(value, datetime.datetime):
            zoned = value if value.tzinfo is not None else value.replace(tzinfo=datetime.timezone.utc)
            passed = zoned - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
            whole = passed // datetime.timedelta(microseconds=1) * 1000
            return whole + int(getattr(value, "nanosecond", 0))
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, bool) or not isinstance(number, int | float) or number != number or abs(number) == np.inf:
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise DpformerError(
            f"row {row + 1} of the frame: the timestamp {value!r} is not a time; give numbers, datetimes or ISO dates"
        ) from None
    return number


def _ratings(values: list[Any]) -> np.ndarray:
    try:
        found = np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        found = np.array([np.nan])
    if not np.isfinite(found).all():
        raise DpformerError("the frame has a rating that is not a finite number")
    return found
