"""Interactions of a data frame: pandas, Polars, Arrow, or a dict of sequences.

A column of one plain type (integers, floats, dates, or only text) is converted as a whole, parsing each distinct value
once; any other, cell by cell (`cells.py`). Both give the same result: an id or a time is a function of its own cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.columns import Columns, resolve
from dpformer.data.filters import Filters
from dpformer.data.interactions import Interactions
from dpformer.data.reading import Reading
from dpformer.data.sources.cells import Cells, Times, encoded, numbers, times
from dpformer.errors import DpformerError


def from_frame(
    frame: Any, columns: Columns | None = None, *, order: str = "time", ratings: bool = False
) -> Interactions:
    """The interactions of a data frame: pandas, Polars, an Arrow table, or a dict of sequences.

    Args:
        frame: the frame, with columns named as in a file.
        columns: names of columns, if they are not the usual ones.
        order: "time": by the timestamp column; "file": its rows are in order of time.
        ratings: also read the ratings, for a filter.
    """
    roles = resolve(_names(frame), columns or Columns(), rating=ratings, order=order, where="the frame")
    users, user_ids = encoded(Cells.of(frame[roles["user"]]), "user")
    items, item_ids = encoded(Cells.of(frame[roles["item"]]), "item")
    for codes, role in ((users, "user"), (items, "item")):
        if (codes < 0).any():
            raise DpformerError(f"row {int(np.argmin(codes)) + 1} of the frame has no {role}_id: the cell is empty")
    return Interactions(
        users=users,
        items=items,
        user_ids=user_ids,
        item_ids=item_ids,
        timestamps=_all_there(times(Cells.of(frame[roles["timestamp"]])), "timestamp") if order == "time" else None,
        ratings=_all_there(numbers(Cells.of(frame[roles["rating"]])), "rating") if ratings else None,
        format="frame",
    )


def store_frame(frame: Mapping[str, Any], path: Path, columns: Columns, reading: Reading, filters: Filters) -> None:
    """Write what training needs of a frame to a Parquet file, which is read like any other.

    Column names are unchanged. Missing values become NULL, so that the reader skips and counts them, or reports the
    row; so do invalid ones, if bad rows are to be skipped.
    """
    from dpformer.engines.duckdb_connection import connect, name, text

    skip = reading.skip_bad_rows
    names = _names(frame)
    roles = resolve(names, columns, rating=filters.min_rating is not None, order=reading.order, where="the frame")
    row_filter = filters.row_filter.on(names, "the frame") if filters.row_filter is not None else None
    stored = {roles[role]: _ids(Cells.of(frame[roles[role]]), role, skip=skip) for role in ("user", "item")}
    if "timestamp" in roles:
        found = times(Cells.of(frame[roles["timestamp"]]), skip=skip)
        if found.ranks and (filters.window is not None or row_filter is not None):
            raise DpformerError(
                "the frame has times more precise than a float or nanoseconds can represent: round them"
            )
        stored[roles["timestamp"]] = found
    if "rating" in roles:
        stored[roles["rating"]] = numbers(Cells.of(frame[roles["rating"]]), skip=skip)
    for column in row_filter.columns if row_filter is not None else ():
        if column not in stored:
            stored[column] = _values(Cells.of(frame[column]))
    arrays, selected = {}, []
    for number, (column, values) in enumerate(stored.items()):
        arrays[f"v{number}"] = values.numbers
        cell = f"make_timestamp_ns(v{number})" if values.dates else f"v{number}"
        if values.there is not None:
            arrays[f"there{number}"] = values.there
            cell = f"CASE WHEN there{number} THEN {cell} END"
        selected.append(f"{cell} AS {name(column)}")
    with connect(what="the frame") as connection:
        connection.register("frame", arrays)
        connection.execute(f"COPY (SELECT {', '.join(selected)} FROM frame) TO {text(str(path))} (FORMAT parquet)")


def _names(frame: Any) -> list[str]:
    def found() -> Iterable[Any]:
        if getattr(frame, "column_names", None):  # Arrow
            return frame.column_names
        return frame.columns if hasattr(frame, "columns") else frame.keys()

    return [str(column) for column in found()]


def _all_there(values: Times, role: str) -> np.ndarray:
    if values.there is not None:
        raise DpformerError(f"row {int(np.argmin(values.there)) + 1} of the frame: the {role} is missing")
    return values.numbers


def _ids(cells: Cells, role: str, *, skip: bool) -> Times:
    """Ids as integers if they have such a type, otherwise as text."""
    if isinstance(cells.values, np.ndarray) and cells.values.dtype.kind in "iu":
        return cells.spread(cells.values)
    codes, names = encoded(cells, role, skip=skip)
    ids = np.array([*names, ""], dtype=object)[codes]
    return Times(ids, None if (codes >= 0).all() else codes >= 0)


def _values(cells: Cells) -> Times:
    """A column for a condition: numbers and dates unchanged, anything else as text."""
    if isinstance(cells.values, np.ndarray):
        if cells.values.dtype.kind == "M":
            return times(cells)
        return cells.spread(cells.values)
    if set(map(type, cells.values)) <= {bool}:
        return cells.spread(np.array(cells.values, dtype=bool))
    return cells.spread(np.array([*map(str, cells.values)], dtype=object))
