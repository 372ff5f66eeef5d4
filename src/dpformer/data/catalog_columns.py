"""Columns of a public catalogue, for rules at request time ("only toys", "at most two per brand").

A catalogue read for training (`read_catalog`) keeps what helps a model: values that several items share, words of
titles, binned numbers. A rule needs every value as in the file, so the columns are read again here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dpformer.data.catalog import _ids, _places, _read, _values
from dpformer.errors import DpformerError


@dataclass(frozen=True)
class Column:
    """One column over items 0 … M−1: the values of item i are links[offsets[i]:offsets[i + 1]], numbers of `values`."""

    name: str
    values: Sequence[str]  # (G,)
    offsets: np.ndarray  # (M + 1,) int64
    links: np.ndarray  # (n,) int64
    numbers: np.ndarray  # (M,) float64; NaN unless the cell is a single number

    @cached_property
    def origins(self) -> np.ndarray:  # (n,) int64
        """The item of each link."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        places: dict[str, list[int]] = {}
        for number, value in enumerate(self.values):
            places.setdefault(_key(value), []).append(number)
        return places

    def having(self, wanted: Sequence[str]) -> np.ndarray:  # (M,) bool
        """Items with at least one of the values, ignoring case; a value that no item has is an error."""
        missing = [value for value in wanted if _key(value) not in self._places]
        if missing:
            some = ", ".join(map(repr, self.values[:5]))
            raise DpformerError(f"no item has {self.name} = {missing[0]!r}; values are {some}, …")
        chosen = np.zeros(len(self.values), bool)
        chosen[[number for value in wanted for number in self._places[_key(value)]]] = True
        found = np.zeros(len(self.offsets) - 1, bool)
        found[self.origins[chosen[self.links]]] = True
        return found

    def between(self, low: float, high: float) -> np.ndarray:  # (M,) bool
        """Items whose number is between `low` and `high`, inclusive."""
        if np.isnan(self.numbers).all():
            raise DpformerError(f"column {self.name!r} holds no numbers; give values instead of min and max")
        with np.errstate(invalid="ignore"):
            return (self.numbers >= low) & (self.numbers <= high)


@dataclass(frozen=True)
class CatalogColumns:
    """All columns of a catalogue besides id and title, for the items of a model in the model's order."""

    columns: dict[str, Column]

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            known = ", ".join(map(repr, self.columns)) or "none besides id and title"
            raise DpformerError(f"the catalogue has no column {name!r}; its columns are {known}")
        return self.columns[name]


def read_columns(path: str | Path, items: Sequence[str]) -> CatalogColumns:
    """Read the columns of a catalogue for the given items.

    Args:
        path: the file, in any format that `--catalog` accepts.
        items: ids in the model's order; an item missing in the catalogue has no values.
    """
    path = Path(path)
    table = _read(path, None)
    place = _places(table, path, None, None)
    rows = [row for row in table.rows if any(field not in (None, "") for field in row)]
    row_of = {name: number for number, name in enumerate(_ids(rows, place[0], path, start=2 if table.named else 1))}
    chosen = [row_of.get(name, -1) for name in items]
    found = {}
    for number, name in enumerate(table.columns):
        if number not in place:
            found[name] = _column(name, [None if row < 0 else rows[row][number] for row in chosen])
    return CatalogColumns(found)


def _column(name: str, cells: Sequence[object]) -> Column:
    values: dict[str, int] = {}
    links: list[int] = []
    offsets = [0]
    numbers = np.full(len(cells), np.nan)
    for item, cell in enumerate(cells):
        own = dict.fromkeys(_values(cell))  # distinct values
        links += [values.setdefault(value, len(values)) for value in own]
        offsets.append(len(links))
        if len(own) == 1:
            numbers[item] = _number(next(iter(own)))
    return Column(name, list(values), np.array(offsets), np.array(links, dtype=np.int64), numbers)


def _key(value: str) -> str:
    """The comparison key of a value: ignores case and the zeros of 5.0."""
    return re.sub(r"(?<=\d)\.0+$", "", value.casefold())


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
