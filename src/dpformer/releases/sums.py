r"""The exact sums of one round of the counts, in whole numbers: the same from any engine, in any order.

A user's vector v (weights added up in each cell, whole numbers) becomes q = ⌊G·v / (√S·(1 + 10⁻⁹))⌋ with S = Σ v²
exactly and G = 2²⁴: rounded towards zero, so that ‖q‖ ≤ G. What a round adds up are these whole numbers, and sums of
whole numbers depend neither on order nor on the engine; √, × and ÷ of float64 are correctly rounded everywhere (IEEE
754). docs/maths/counts.md has the argument.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from dpformer.errors import DpformerError
from dpformer.progress import advance

WINDOW, DECAY = 12, 0.88
WEIGHTS = tuple(round(256 * DECAY**distance) for distance in range(WINDOW))  # of pairs 1, 2, … items apart
GRID = 2**24  # one user's norm
SLACK = 1_000_000_001 / 1_000_000_000  # floating point must not lift a norm above GRID
LONGEST = 2**20  # items of a user that count, the last ones: (Σ WEIGHTS · LONGEST)² < 2⁶³, so S is exact
ITEMS_AT_ONCE = 2**18  # of the histories: 3 million pairs
BITMAP = 2**34  # cells for which a bit each is kept
_BITS = 4  # for a distance
_VALUE = 25  # bits for one user's part of a cell


class Sums(Protocol):
    """All users' histories, of which only sums are asked, in units of 1/GRID.

    A history x_1, …, x_n gives a pair (x_t, x_{t+k}) for every t and k = 1..WINDOW, of weight WEIGHTS[k - 1]; pairs of
    an item with itself say nothing and are left out. `places` (num_items,) are places of items among the m that count,
    -1 for others; those are skipped over, but count as steps. A pair belongs to a cell:

        unordered   {a, b}  cell  b(b−1)/2 + a  for a < b: dense, 0 … m(m−1)/2 − 1 over m items
        directed    (a, b)  cell  2·(place of {a, b} among the surviving pairs) + [a > b]
    """

    num_users: int

    def items(self, num_items: int) -> np.ndarray:
        """(num_items,) int64: Σ_{u has i} ⌊G/√n_u⌋, n_u the number of *distinct* items of a user."""

    def all_pairs(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(cells (n,) ascending, Σ_u q_u there (n,), positive): all unordered pairs of items with a place."""

    def pairs(self, places: np.ndarray, survivors: np.ndarray, directed: bool) -> np.ndarray:
        """(K,) or, directed, (2K,) int64: Σ_u q_u over the surviving unordered cells (K,), ascending, alone."""


def quantised(values: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """q of values of users whose squares add up to `squares`."""
    return np.floor(values * float(GRID) / (np.sqrt(squares.astype(np.float64)) * SLACK)).astype(np.int64)


class ArraySums:
    """Histories in arrays, memory-mapped or not: user u's items at items[starts[u]:stops[u]]."""

    def __init__(self, items: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
        self.history, self.stops = items, np.asarray(stops, dtype=np.int64)
        self.starts = np.maximum(starts, self.stops - LONGEST).astype(np.int64)
        self.num_users = len(stops)

    @classmethod
    def packed(cls, items: np.ndarray, offsets: np.ndarray) -> "ArraySums":
        """User u's items at items[offsets[u]:offsets[u + 1]]."""
        items, offsets = np.asarray(items), np.asarray(offsets)
        if items.ndim != 1 or (items.size and items.dtype.kind not in "iu") or offsets.dtype.kind not in "iu":
            raise ValueError(f"a history must be a row of whole numbers, not {items.dtype} of shape {items.shape}")
        ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, -1)
        if ends != (0, len(items)) or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets must rise from 0 to the number of items, {len(items)}")
        if len(offsets) == 1:
            raise ValueError("there are no histories: counts are of users")
        return cls(items, offsets[:-1], offsets[1:])

    def items(self, num_items: int) -> np.ndarray:
        sums = np.zeros(num_items, dtype=np.int64)
        for sequence, offsets in self._chunks():
            if len(sequence) and not 0 <= int(sequence.min()) <= int(sequence.max()) < num_items:
                seen = f"{int(sequence.min())}..{int(sequence.max())}"
                raise ValueError(f"items must be in 0..{num_items - 1}, not {seen}")
            users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            distinct = np.sort(users * num_items + sequence)
            distinct = distinct[np.append(True, distinct[1:] != distinct[:-1])[: len(distinct)]]
            user, item = np.divmod(distinct, num_items)
            lengths = np.bincount(user)
            parts = quantised(np.ones(len(lengths)), np.maximum(lengths, 1))
            sums += np.bincount(item, weights=parts[user], minlength=num_items).astype(np.int64)  # below 2⁵³: exact
        return sums

    def all_pairs(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        num_items = int(places.max(initial=-1)) + 1
        merging = _Merging()
        for sequence, offsets in self._chunks():
            keys = [_keys(*pair) for pair in _pairs(places[sequence], offsets, num_items * (num_items - 1) // 2)]
            merging.add(*_vectors(np.concatenate(keys), num_items * (num_items - 1) // 2))
        return merging.result()

    def pairs(self, places: np.ndarray, survivors: np.ndarray, directed: bool) -> np.ndarray:
        width = len(survivors) * (2 if directed else 1)
        sums = np.zeros(width, dtype=np.int64)
        if not width:
            return sums
        num_items = int(places.max(initial=-1)) + 1
        among = _Among(survivors, num_items * (num_items - 1) // 2)
        for sequence, offsets in self._chunks():
            keys = []
            for users, cells, backward, distance, _ in _pairs(places[sequence], offsets, 0):
                rows, place = among(cells)
                place = 2 * place + backward[rows] if directed else place
                keys.append(_keys(users[rows], place, backward, distance, width))
            cells, values = _vectors(np.concatenate(keys), width)
            sums += np.bincount(cells, weights=values, minlength=width).astype(np.int64)  # below 2⁵³: exact
        return sums

    def _chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(items (n,) int64, offsets) of some users at a time."""
        lengths = self.stops - self.starts
        ends = np.cumsum(lengths)
        user = 0
        while user < self.num_users:
            base = ends[user] - lengths[user]
            stop = int(np.searchsorted(ends, base + ITEMS_AT_ONCE, side="right"))
            stop = min(max(stop, user + 1), self.num_users)  # one user at least
            offsets = np.concatenate([[0], ends[user:stop] - base])
            first, last = self.starts[user], self.stops[stop - 1]
            if last - first == offsets[-1]:
                yield np.asarray(self.history[first:last], dtype=np.int64), offsets
            else:  # what is held out lies between
                rows = np.arange(offsets[-1]) + np.repeat(self.starts[user:stop] - offsets[:-1], lengths[user:stop])
                yield np.asarray(self.history[rows], dtype=np.int64), offsets
            advance(stop - user)
            user = stop


_Pairs = tuple[np.ndarray, np.ndarray, np.ndarray, int, int]


def _pairs(sequence: np.ndarray, offsets: np.ndarray, width: int) -> Iterator[_Pairs]:
    """(users, unordered cells, whether from the higher to the lower, distance from 0, width) for each distance."""
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    for distance in range(1, WINDOW + 1):
        first, second = sequence[:-distance], sequence[distance:]
        good = (first >= 0) & (second >= 0) & (first != second) & (users[:-distance] == users[distance:])
        rows = np.flatnonzero(good)
        first, second = first[rows], second[rows]
        high = np.maximum(first, second)
        yield users[rows], (high * (high - 1) >> 1) + np.minimum(first, second), first > second, distance - 1, width


def _keys(users: np.ndarray, cells: np.ndarray, backward: np.ndarray, distance: int, width: int) -> np.ndarray:
    """User, cell and distance in one number, so that sorting numbers is all that has to be sorted."""
    if len(users) and int(users[-1]).bit_length() + width.bit_length() + _BITS > 63:  # two users would become one
        raise DpformerError(f"{width:,} pairs of items are too many to be counted here: give --engine duckdb")
    return ((users << width.bit_length()) + cells << _BITS) + distance


def _vectors(keys: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(cells, q) of every user's vector, without zeros. Weights of one cell are added before the norm is taken."""
    if not len(keys):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    keys = np.sort(keys)
    weights = np.array(WEIGHTS, dtype=np.int64)[keys & (1 << _BITS) - 1]
    keys >>= _BITS
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    values = np.add.reduceat(weights, starts)
    cells = keys[starts]
    users = cells >> width.bit_length()
    cells &= (1 << width.bit_length()) - 1
    owners = np.flatnonzero(np.append(True, users[1:] != users[:-1]))
    squares = np.add.reduceat(values * values, owners)
    q = quantised(values, np.repeat(squares, np.diff(np.append(owners, len(users)))))
    there = np.flatnonzero(q)
    return cells[there], q[there]


class _Among:
    """Where cells stand among the survivors: by a bit a cell and a count a word, or by search where they are many."""

    def __init__(self, survivors: np.ndarray, num_cells: int) -> None:
        self.survivors = survivors
        self.words: np.ndarray | None = None
        if num_cells <= BITMAP:
            word, bit = survivors >> 6, np.uint64(1) << (survivors & 63).astype(np.uint64)
            starts = np.flatnonzero(np.append(True, word[1:] != word[:-1]))
            self.words = np.zeros((num_cells >> 6) + 1, dtype=np.uint64)
            self.words[word[starts]] = np.bitwise_or.reduceat(bit, starts)
            self.before = np.zeros(len(self.words), dtype=np.int64)
            np.cumsum(np.bitwise_count(self.words[:-1]), out=self.before[1:])

    def __call__(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows of the cells that survive, place of each among the survivors)."""
        if self.words is None:
            place = np.minimum(np.searchsorted(self.survivors, cells), len(self.survivors) - 1)
            rows = np.flatnonzero(self.survivors[place] == cells)
            return rows, place[rows]
        word, bit = self.words[cells >> 6], (cells & 63).astype(np.uint64)
        rows = np.flatnonzero(word >> bit & np.uint64(1))
        below = word[rows] & ((np.uint64(1) << bit[rows]) - np.uint64(1))
        return rows, self.before[cells[rows] >> 6] + np.bitwise_count(below)


class _Merging:
    """Sums of many users by cell; memory is the cells that occur, 16 bytes each, twice while merging."""

    def __init__(self) -> None:
        self.cells, self.sums = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self.size = 0

    def add(self, cells: np.ndarray, values: np.ndarray) -> None:
        self.waiting.append((cells, values))
        self.size += len(cells)
        if self.size > max(len(self.cells), 2**23):  # so that each cell is merged a few times
            self._merge()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        self._merge()
        return self.cells, self.sums

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
        order = np.argsort(cells, kind="stable")  # two sorted runs
        self.cells, self.sums = _added_up(cells[order], sums[order])


def _added_up(cells: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(cells):
        return cells, values
    starts = np.flatnonzero(np.append(True, cells[1:] != cells[:-1]))
    return cells[starts], np.add.reduceat(values, starts)
