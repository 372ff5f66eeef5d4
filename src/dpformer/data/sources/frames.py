"""Interactions of a data frame: pandas, Polars, Arrow, or a dict of sequences.

A column that is of one plain type (whole numbers, floats, dates, or nothing but text) is read as a whole, of which only
different values are looked at one by one; any other cell by cell. Both give the same: an id or a time is a function of
its own cell.
"""

import datetime
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dpformer.data.columns import Columns, resolve
from dpformer.data.interactions import SMALL, Codes, Interactions
from dpformer.errors import DpformerError

_TYPED = re.compile(r"u?int|float|double|date|timestamp")  # how types of columns that fit an array are called

Column = np.ndarray | list[Any]


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
    users, user_ids = _encoded(_column(frame[roles["user"]]), "user")
    items, item_ids = _encoded(_column(frame[roles["item"]]), "item")
    return Interactions(
        users=users,
        items=items,
        user_ids=user_ids,
        item_ids=item_ids,
        timestamps=_times(_column(frame[roles["timestamp"]])) if order == "time" else None,
        ratings=_ratings(_column(frame[roles["rating"]])) if ratings else None,
        format="frame",
    )


def _names(frame: Any) -> Iterable[Any]:
    return frame.columns if hasattr(frame, "columns") else frame.keys()


def _column(values: Any) -> Column:
    """An array of numbers or dates where the column is of such a type and nothing is missing; else a list."""
    kind = getattr(values, "dtype", None) or getattr(values, "type", None)  # `type`: of Arrow
    if _TYPED.match(str(kind).lower()):
        array = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
        if array.dtype.kind in "iu" or (array.dtype.kind in "fM" and not (array != array).any()):
            return array
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(values, method):
            return list(getattr(values, method)())
    return list(values)


def _encoded(values: Column, role: str) -> tuple[np.ndarray, list[str]]:
    """(the code of each row's id, the ids in the order they appear)."""
    codes = Codes()
    if isinstance(values, list) and not _one_plain_type(values):
        return _one_by_one(values, codes.__getitem__, range(len(values)), role).astype(np.int32), codes.names
    distinct, first, places = _distinct(values)
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":  # of single precision, too
        distinct = [values.dtype.type(value) for value in distinct]
    return _one_by_one(distinct, codes.__getitem__, first, role).astype(np.int32)[places], codes.names


def _one_by_one(values: list[Any], code: Callable[[Any], int], rows: Any, role: str) -> np.ndarray:
    found = np.empty(len(values), dtype=np.int64)
    for place, value in enumerate(values):
        try:
            found[place] = code(value)
        except (ValueError, TypeError) as error:  # TypeError: a list is no key
            raise DpformerError(f"row {rows[place] + 1} of the frame has no {role}_id: {error}") from None
    return found


def _one_plain_type(values: list[Any]) -> bool:
    """Nothing but text, or nothing but small whole numbers: what a dict tells apart as `Codes` does."""
    kinds = set(map(type, values))
    return kinds == {str} or (kinds == {int} and min(values) > -SMALL and max(values) < SMALL)


def _distinct(values: Column) -> tuple[list[Any], Any, np.ndarray]:
    """(what is different, in the order it appears; the first row of each; the place of each row's value there)."""
    if isinstance(values, list):
        place = {value: number for number, value in enumerate(dict.fromkeys(values))}
        places = np.fromiter(map(place.__getitem__, values), np.int64, len(values))
        first = np.empty(len(place), dtype=np.int64)
        first[places[::-1]] = np.arange(len(values))[::-1]
        return list(place), first, places
    distinct, first, places = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return distinct[order].tolist(), first[order], rank[places]


def _times(values: Column) -> np.ndarray:
    """Exact: numbers as they are, dates as nanoseconds since 1970; numbers and dates are not mixed."""
    if isinstance(values, np.ndarray):
        found = _times_of_array(values)
        if found is not None:
            return found
        values = values.tolist()
    kinds = set(map(type, values))
    if kinds == {int} and min(values) > -(2**63) and max(values) < 2**63:
        return np.array(values, dtype=np.int64)
    if kinds == {str}:
        distinct, first, places = _distinct(values)
        return _ranked([_number(value, row) for value, row in zip(distinct, first.tolist(), strict=True)])[places]
    numbers = [_number(value, row) for row, value in enumerate(values)]
    if len({isinstance(value, int | float) for value in values}) > 1:
        raise DpformerError("the frame has times that are numbers and times that are not: write them in one way")
    return _ranked(numbers)


def _times_of_array(values: np.ndarray) -> np.ndarray | None:
    """None where it takes exact arithmetic, or a sentence."""
    if values.dtype.kind == "M":
        nanoseconds = values.astype("datetime64[ns]")
        return nanoseconds.astype(np.int64) if (nanoseconds.astype(values.dtype) == values).all() else None
    if values.dtype.kind == "f":
        return np.unique(values, return_inverse=True)[1] if np.isfinite(values).all() else None
    return values.astype(np.int64) if not len(values) or int(values.max()) < 2**63 else None


def _ranked(numbers: list[int | float]) -> np.ndarray:
    """Whole numbers as they are; of others, which compare exactly in Python, their order only."""
    if all(isinstance(number, int) and abs(number) < 2**63 for number in numbers):
        return np.array(numbers, dtype=np.int64)
    places = {number: place for place, number in enumerate(sorted(set(numbers)))}
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


def _ratings(values: Column) -> np.ndarray:
    try:
        found = np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        found = np.array([np.nan])
    if not np.isfinite(found).all():
        raise DpformerError("the frame has a rating that is not a finite number")
    return found
