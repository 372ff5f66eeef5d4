"""Cells of a table too large for memory: indices of some of them, and sums of those that occur."""

import math
from collections.abc import Iterator

import numpy as np

BITMAP = 2**33  # maximum number of cells for a bitmap
AT_ONCE = 2**20  # survivors marked, or cells looked up, at a time
_BITS_PER_QUERY = 128
_VALUE = 25  # bits of one user's contribution to a cell


def cells_below(place: int) -> int:
    """The number of unordered pairs of places below this one: b(b−1)/2, the first cell of {0, b}."""
    return place * (place - 1) // 2


def place_below(cells: int) -> int:
    """The highest place below which there are at most this many pairs."""
    place = (1 + math.isqrt(1 + 8 * cells)) // 2
    return place if cells_below(place) <= cells else place - 1


class Among:
    """Indices of cells among the survivors: by bitmap and popcounts per word, or by search if it would be too large for
    the expected number of queries."""

    def __init__(self, survivors: np.ndarray, num_cells: int, queries: int) -> None:
        self.survivors = survivors
        self.words: np.ndarray | None = None
        if num_cells <= min(BITMAP, _BITS_PER_QUERY * queries):
            self.words = np.zeros((num_cells >> 6) + 1, dtype=np.uint64)
            for start in range(0, len(survivors), AT_ONCE):
                part = survivors[start : start + AT_ONCE]
                word, bit = part >> 6, np.uint64(1) << (part & 63).astype(np.uint64)
                starts = np.flatnonzero(np.append(True, word[1:] != word[:-1]))
                self.words[word[starts]] |= np.bitwise_or.reduceat(bit, starts)
            self.before = np.zeros(len(self.words), dtype=np.int32 if len(survivors) < 2**31 else np.int64)
            np.cumsum(np.bitwise_count(self.words[:-1]), out=self.before[1:])

    def __call__(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows of the cells that survive, index of each among the survivors)."""
        if self.words is None:
            place = np.minimum(np.searchsorted(self.survivors, cells), len(self.survivors) - 1)
            rows = np.flatnonzero(self.survivors[place] == cells)
            return rows, place[rows]
        word, bit = self.words[cells >> 6], (cells & 63).astype(np.uint64)
        rows = np.flatnonzero(word >> bit & np.uint64(1))
        below = word[rows] & ((np.uint64(1) << bit[rows]) - np.uint64(1))
        return rows, self.before[cells[rows] >> 6].astype(np.int64) + np.bitwise_count(below)


class Counters:
    """Sums over users by cell, for a table small enough for one counter per cell."""

    def __init__(self, num_cells: int) -> None:
        self.sums = np.zeros(num_cells, dtype=np.int64)

    def add(self, cells: np.ndarray, values: np.ndarray) -> None:
        np.add.at(self.sums, cells, values)

    def results(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(cells, sums) of non-zero cells, ascending, in blocks."""
        for start in range(0, len(self.sums), AT_ONCE):
            part = self.sums[start : start + AT_ONCE]
            there = np.flatnonzero(part)
            yield there + start, part[there]


class Merging:
    """Sums over users by cell; memory is 16 bytes per occurring cell, twice that while merging."""

    def __init__(self) -> None:
        self.cells, self.sums = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self.size = 0

    def add(self, cells: np.ndarray, values: np.ndarray) -> None:
        self.waiting.append((cells, values))
        self.size += len(cells)
        if self.size > max(len(self.cells), 2**23):  # so that each cell is merged only a few times
            self._merge()

    def results(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        self._merge()
        yield self.cells, self.sums

    def _merge(self) -> None:
        if not self.waiting:
            return
        cells, values = (np.concatenate(parts) for parts in zip(*self.waiting, strict=True))
        self.waiting, self.size = [], 0
        if len(cells) and int(cells.max()) < 2 ** (63 - _VALUE) and int(values.max()) < 2**_VALUE:
            packed = np.sort((cells << _VALUE) + values)
            cells, values = packed >> _VALUE, packed & (1 << _VALUE) - 1
        else:
            order = np.argsort(cells)
            cells, values = cells[order], values[order]
        new = _added_up(cells, values)
        if not len(self.cells):
            self.cells, self.sums = new
            return
        cells, sums = np.concatenate([self.cells, new[0]]), np.concatenate([self.sums, new[1]])
        order = np.argsort(cells, kind="stable")  # merges two sorted runs
        self.cells, self.sums = _added_up(cells[order], sums[order])


def _added_up(cells: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(cells):
        return cells, values
    starts = np.flatnonzero(np.append(True, cells[1:] != cells[:-1]))
    return cells[starts], np.add.reduceat(values, starts)
