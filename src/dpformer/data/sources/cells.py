"""The cells of a data frame column as ids, times and numbers, and which of them are missing."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np

from dpformer.data.interactions import SMALL, Codes
from dpformer.errors import DpformerError

Column = np.ndarray | list[Any]
_MISSING = ("NAType", "NaTType")  # types of pandas


class Times(NamedTuple):
    """One number or one id per row."""

    numbers: np.ndarray  # (rows,)
    there: np.ndarray | None = None  # (rows,) bool: rows with a value; None: all
    dates: bool = False  # nanoseconds since 1970
    ranks: bool = False  # the numbers are ranks only


@dataclass(frozen=True)
class Cells:
    """The contents of a column.

    Attributes:
        values: the values that are present: an array of integers, floats or dates, or a list.
        rows: the row of each value; None: nothing is missing.
        total: number of rows.
    """

    values: Column
    rows: np.ndarray | None
    total: int

    @classmethod
    def of(cls, column: Any) -> Cells:
        """From a series of any library, an array, or a list. None, NaN, NA and NaT are missing."""
        series = nw.from_native(column, series_only=True, pass_through=True)
        if isinstance(series, nw.Series):
            there = ~series.is_null().to_numpy().astype(bool)
            rows = None if there.all() else np.flatnonzero(there)
            return cls._whole(series if rows is None else series.drop_nulls(), rows, len(there))
        values = _listed(column)
        return cls._present(values, None, len(values))

    @classmethod
    def _whole(cls, series: Any, rows: np.ndarray | None, total: int) -> Cells:
        kind = series.dtype
        if (kind.is_integer() or kind.is_float() or kind.is_temporal()) and not isinstance(
            kind, (nw.Duration, nw.Time)
        ):
            array = np.asarray(series.to_numpy())
            if array.dtype.kind in "iufM":
                return cls._present(array, rows, total)
        return cls._present(series.to_list(), rows, total)

    @classmethod
    def _present(cls, values: Column, rows: np.ndarray | None, total: int) -> Cells:
        if isinstance(values, np.ndarray):
            there = values == values if values.dtype.kind in "fM" else None
        elif set(map(type, values)) <= {str, int}:
            there = None
        else:
            there = np.fromiter((not _missing(value) for value in values), bool, len(values))
        if there is None or there.all():
            return cls(values, rows, total)
        kept = np.flatnonzero(there)
        left = values[kept] if isinstance(values, np.ndarray) else [values[place] for place in kept.tolist()]
        return cls(left, kept if rows is None else rows[kept], total)

    def row(self, place: int) -> int:
        """The row number of a value, from 1."""
        return place + 1 if self.rows is None else int(self.rows[place]) + 1

    def spread(self, values: np.ndarray, good: np.ndarray | None = None, **more: bool) -> Times:
        """Values in their rows; those that are not `good` become missing too."""
        if self.rows is None:
            return Times(values, good, **more)
        numbers = np.zeros(self.total, dtype=values.dtype)
        there = np.zeros(self.total, dtype=bool)
        numbers[self.rows] = values
        there[self.rows] = True if good is None else good
        return Times(numbers, there, **more)


def _listed(column: Any) -> Column:
    if isinstance(column, np.ndarray) and column.dtype.kind in "iufM":
        return column
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(column, method):
            return list(getattr(column, method)())
    return list(column)


def _missing(value: Any) -> bool:
    return value is None or type(value).__name__ in _MISSING or (isinstance(value, float) and value != value)


# Ids.


def encoded(cells: Cells, role: str, *, skip: bool = False) -> tuple[np.ndarray, list[str]]:
    """(the code of each row's id, -1 if missing; the ids in order of appearance).

    Invalid ids are refused or, with `skip`, become missing.
    """
    codes, values = Codes(), cells.values
    if isinstance(values, list) and not _one_plain_type(values):
        found = _one_by_one(values, codes.__getitem__, range(len(values)), cells, role, skip)
    else:
        distinct, first, places = _distinct(values)
        if isinstance(values, np.ndarray) and values.dtype.kind == "f":  # single precision too
            distinct = [values.dtype.type(value) for value in distinct]
        found = _one_by_one(distinct, codes.__getitem__, first, cells, role, skip)[places]
    if cells.rows is None:
        return found.astype(np.int32), codes.names
    everywhere = np.full(cells.total, -1, dtype=np.int32)
    everywhere[cells.rows] = found
    return everywhere, codes.names


def _one_by_one(
    values: list[Any], code: Callable[[Any], int], places: Any, cells: Cells, role: str, skip: bool
) -> np.ndarray:
    found = np.empty(len(values), dtype=np.int64)
    for number, value in enumerate(values):
        try:
            found[number] = code(value)
        except (ValueError, TypeError) as error:  # TypeError: unhashable
            if not skip:
                row = cells.row(int(places[number]))
                raise DpformerError(f"row {row} of the frame has no {role}_id: {error}") from None
            found[number] = -1
    return found


def _one_plain_type(values: list[Any]) -> bool:
    """Only text, or only small integers: what a dict distinguishes as `Codes` does."""
    kinds = set(map(type, values))
    return kinds == {str} or (kinds == {int} and min(values) > -SMALL and max(values) < SMALL)


def _distinct(values: Column) -> tuple[list[Any], Any, np.ndarray]:
    """(distinct values in order of appearance; the first position of each; the index of each value among them)."""
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


# Times and numbers.


def times(cells: Cells, *, skip: bool = False) -> Times:
    """Exact: numbers unchanged, dates as nanoseconds since 1970; numbers and dates must not be mixed."""
    values = cells.values
    if isinstance(values, np.ndarray):
        if values.dtype.kind == "M":
            nanoseconds = values.astype("datetime64[ns]")
            if (nanoseconds.astype(values.dtype) == values).all():
                return cells.spread(nanoseconds.astype(np.int64), dates=True)
        elif values.dtype.kind == "f" and (skip or np.isfinite(values).all()):
            return _floats(cells, values)
        elif values.dtype.kind != "f" and (not len(values) or int(values.max()) < 2**63):
            return cells.spread(values.astype(np.int64))
        values = values.tolist()
    distinct, first, places = _distinct(values) if set(map(type, values)) == {str} else _each(values)
    found = [_instant(value, cells, int(place), skip) for value, place in zip(distinct, first, strict=True)]
    kinds = {isinstance(value, _NUMBERS) for value, number in zip(distinct, found, strict=True) if number is not None}
    if len(kinds) > 1:
        raise DpformerError("the frame has times that are numbers and times that are not: use one kind")
    numbers, ranks = _ranked([0 if number is None else number for number in found])
    good = np.array([number is not None for number in found], dtype=bool)[places]
    dates = kinds == {False} and not ranks
    return cells.spread(numbers[places], None if good.all() else good, dates=dates, ranks=ranks)


_NUMBERS = (int, float, np.number)


def _each(values: list[Any]) -> tuple[list[Any], Any, np.ndarray]:
    """As `_distinct`, without searching for duplicates."""
    return values, range(len(values)), np.arange(len(values))


def _floats(cells: Cells, values: np.ndarray) -> Times:
    """Floats unchanged, if reading them to nine decimals distinguishes them."""
    good = np.isfinite(values)
    found = np.where(good, values, 0.0)
    exact = _told_apart(found)
    kept = found if exact else np.unique(found, return_inverse=True)[1].astype(np.int64)
    return cells.spread(kept, None if good.all() else good, ranks=not exact)


def _told_apart(values: np.ndarray) -> bool:
    """Whether distinct floats are distinct to nine decimals, and below 2⁶³."""
    small = np.unique(values[np.abs(values) < 2**24])
    return bool((np.abs(values) < 2**63).all()) and len(np.unique(np.round(small * 1e9))) == len(small)


def _ranked(numbers: list[int | float]) -> tuple[np.ndarray, bool]:
    """Numbers unchanged if an array holds them exactly; otherwise their ranks, compared exactly in Python."""
    if all(isinstance(number, int) and abs(number) < 2**63 for number in numbers):
        return np.array(numbers, dtype=np.int64), False
    if all(isinstance(number, float) or abs(number) < SMALL for number in numbers):
        floats = np.array(numbers, dtype=np.float64)
        if _told_apart(floats):
            return floats, False
    places = {number: place for place, number in enumerate(sorted(set(numbers)))}
    return np.array([places[number] for number in numbers], dtype=np.int64), True


def _instant(value: Any, cells: Cells, place: int, skip: bool) -> int | float | None:
    """A time as a number; None if it is invalid and such rows are skipped."""
    seen = value
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
        if skip:
            return None
        raise DpformerError(
            f"row {cells.row(place)} of the frame: the timestamp {seen!r} is not a time; give numbers, datetimes or "
            "ISO dates"
        ) from None
    return number


def numbers(cells: Cells, *, skip: bool = False) -> Times:
    """Finite numbers, such as ratings."""
    values = list(cells.values) if isinstance(cells.values, list) else cells.values
    found = np.full(len(values), np.nan)
    for place, value in enumerate(values) if isinstance(values, list) else ():
        try:
            found[place] = float(value)
        except (ValueError, TypeError):
            found[place] = np.nan
    found = values.astype(np.float64) if isinstance(values, np.ndarray) else found
    good = np.isfinite(found)
    if not good.all() and not skip:
        place = int(np.argmin(good))
        raise DpformerError(f"row {cells.row(place)} of the frame: the rating {values[place]!r} is not a finite number")
    return cells.spread(np.where(good, found, 0.0), None if good.all() else good)
