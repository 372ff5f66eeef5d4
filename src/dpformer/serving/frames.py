"""Data frames of any library in and out, through narwhals: the result has the type of the input."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import narwhals as nw

from dpformer.data.catalog import ID_NAMES
from dpformer.errors import DpformerError

# For results without an input frame: the first one installed.
KINDS: tuple[Any, ...] = (
    "pandas",
    "polars",
    "pyarrow",
)


class Frame:
    """A frame of some library, read into memory."""

    def __init__(self, native: Any) -> None:
        try:
            found = nw.from_native(native)
        except TypeError:
            raise DpformerError(
                f"expected a data frame (pandas, Polars, PyArrow or DuckDB) or a path, got a {type(native).__name__}"
            ) from None
        self.lazy = str(found.implementation) if isinstance(found, nw.LazyFrame) else ""
        self.table = found.collect() if isinstance(found, nw.LazyFrame) else found

    def columns(self) -> dict[str, list[Any]]:
        return {name: self.table[name].to_list() for name in self.table.columns}

    def series(self) -> dict[str, Any]:
        """Its columns, unconverted."""
        return {name: self.table[name] for name in self.table.columns}

    def whole_numbers(self, column: str) -> bool:
        """Whether a column holds integers, so that ids are returned as integers."""
        return bool(self.table.schema[column].is_integer())

    def like(self, columns: Mapping[str, Sequence[Any]]) -> Any:
        """A frame of the same library."""
        made = nw.from_dict(dict(columns), backend=self.table.implementation).to_native()
        if "duckdb" in self.lazy.lower():
            import duckdb

            return duckdb.from_arrow(made)
        return made.lazy() if self.lazy and hasattr(made, "lazy") else made


def any_frame(columns: Mapping[str, Sequence[Any]], kind: Any = None) -> Any:
    """A frame of the given library or, by default, of any installed one; without one, the columns themselves."""
    if kind is not None:
        return nw.from_dict(dict(columns), backend=kind).to_native()
    for kind in KINDS:
        if importlib.util.find_spec(kind) is not None:
            return nw.from_dict(dict(columns), backend=kind).to_native()
    return dict(columns)


def write_catalog(frame: Frame, path: Path) -> None:
    """Write a frame of items with all its columns as JSON lines: a cell may be a list."""
    from dpformer.data.columns import plain

    columns = frame.columns()
    names = {plain(name): name for name in reversed(columns)}
    item = next((names[name] for name in ID_NAMES if name in names), None)
    if item is None:
        raise DpformerError(f"the frame of items has no column item_id; it has {', '.join(columns)}")
    rows = (dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            kept = {name: value for name, value in row.items() if not _missing(value)}
            file.write(json.dumps({"item_id": kept.pop(item, ""), **kept}, default=str) + "\n")


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
