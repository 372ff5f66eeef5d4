r"""The exact sums of one round of the counts, in integers: the same from any backend, in any order.

A user's vector v (integer weights added per cell) becomes q = ⌊G·v / (√S·(1 + 10⁻⁹))⌋ with S = Σ v² exactly and
G = 2²⁴: rounded towards zero, so that ‖q‖ ≤ G. A round adds these integers, and sums of integers depend neither on
order nor on the backend; √, × and ÷ of float64 are correctly rounded everywhere (IEEE 754). docs/maths/counts.md has
the argument.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from dpformer.engines.cells import Among, Counters, Merging, cells_below, place_below
from dpformer.errors import DpformerError
from dpformer.progress import advance

WINDOW, DECAY = 12, 0.88
WEIGHTS = tuple(round(256 * DECAY**distance) for distance in range(WINDOW))  # weights of pairs 1, 2, … items apart
GRID = 2**24  # norm of one user's vector
SLACK = 1_000_000_001 / 1_000_000_000  # floating point must not lift a norm above GRID
LONGEST = 2**20  # maximum number of a user's (last) items: (Σ WEIGHTS · LONGEST)² < 2⁶³, so S is exact
MOST_WEIGHT = 100  # maximum weight of an interaction
LONGEST_WEIGHTED = LONGEST // MOST_WEIGHT  # LONGEST where interactions have weights: the same bound on S
ITEMS_AT_ONCE = 2**18  # items of the histories at a time: 3 million pairs
COUNTERS = 2**25  # maximum number of cells of a block with one counter each
CELLS_AT_ONCE = 2**23  # maximum number of occurring cells in a larger block
_BITS = 4  # bits for a distance
_WEIGHT_BITS = 7  # bits for a weight, if interactions have weights

Block = tuple[np.ndarray, np.ndarray]  # cells (n,) int64 ascending, integers (n,) int64


class Sums(Protocol):
    """All users' histories, from which only sums are requested, in units of 1/GRID.

    A history x_1, …, x_n gives a pair (x_t, x_{t+k}) for every t and k = 1..WINDOW, of weight WEIGHTS[k - 1]; pairs of
    an item with itself are ignored. `places` (num_items,) are indices of items among the m selected ones, -1 for
    others; those are skipped, but count as steps. If interactions have weights, the weight of a pair is multiplied by
    that of its later item; if they belong to sessions, only pairs within a session are counted. A pair belongs to a
    cell:

        unordered   {a, b}  cell  b(b−1)/2 + a  for a < b: dense, 0 … m(m−1)/2 − 1 over m items
        directed    (a, b)  cell  2·(place of {a, b} among the surviving pairs) + [a > b]
    """

    num_users: int

    def items(self, num_items: int) -> np.ndarray:
        """(num_items,) int64: Σ_{u has i} ⌊G/√n_u⌋, n_u the number of *distinct* items of a user."""

    def all_pairs(self, places: np.ndarray) -> Iterator[Block]:
        """(cells (n,), Σ_u q_u (n,), positive) of all unordered pairs of selected items, block by block and
        ascending: all blocks together may not fit into memory."""

    def pairs(self, places: np.ndarray, survivors: np.ndarray, directed: bool) -> np.ndarray:
        """(K,) or, directed, (2K,) int64: Σ_u q_u over only the surviving unordered cells (K,), ascending."""

    def shared(self, near: np.ndarray, num_items: int) -> np.ndarray:
        """(2,) int64: Σ_u q_u of two cells: all pairs in the unordered cells `near` (ascending), and all others."""


def quantised(values: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """q of users' values whose squares add up to `squares`."""
    return np.floor(values * float(GRID) / (np.sqrt(squares.astype(np.float64)) * SLACK)).astype(np.int64)


class ArraySums:
    """Histories in arrays, memory-mapped or not: user u's items at items[starts[u]:stops[u]].

    `weights` (1 to MOST_WEIGHT) and `sessions` (numbers that differ between a user's sessions) are parallel to `items`.
    """

    def __init__(
        self,
        items: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
        weights: np.ndarray | None = None,
        sessions: np.ndarray | None = None,
    ) -> None:
        self.history, self.weights, self.sessions = items, weights, sessions
        self.stops = np.asarray(stops, dtype=np.int64)
        self.starts = np.maximum(starts, self.stops - longest(weights)).astype(np.int64)
        self.num_users = len(stops)

    @classmethod
    def packed(cls, items: np.ndarray, offsets: np.ndarray) -> "ArraySums":
        """User u's items at items[offsets[u]:offsets[u + 1]]."""
        items, offsets = np.asarray(items), np.asarray(offsets)
        if items.ndim != 1 or (items.size and items.dtype.kind not in "iu") or offsets.dtype.kind not in "iu":
            raise ValueError(f"a history must be a row of integers, not {items.dtype} of shape {items.shape}")
        ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, -1)
        if ends != (0, len(items)) or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets must increase from 0 to the number of items, {len(items)}")
        if len(offsets) == 1:
            raise ValueError("there are no histories to count")
        return cls(items, offsets[:-1], offsets[1:])

    def items(self, num_items: int) -> np.ndarray:
        sums = np.zeros(num_items, dtype=np.int64)
        for sequence, offsets, _ in self._chunks():
            if len(sequence) and not 0 <= int(sequence.min()) <= int(sequence.max()) < num_items:
                seen = f"{int(sequence.min())}..{int(sequence.max())}"
                raise ValueError(f"items must be in 0..{num_items - 1}, not {seen}")
            users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            distinct = np.sort(users * num_items + sequence)
            distinct = distinct[np.append(True, distinct[1:] != distinct[:-1])[: len(distinct)]]
            user, item = np.divmod(distinct, num_items)
            lengths = np.bincount(user)
            parts = quantised(np.ones(len(lengths)), np.maximum(lengths, 1))
            # Below 2⁵³, hence exact.
            sums += np.bincount(item, weights=parts[user], minlength=num_items).astype(np.int64)
        return sums

    def all_pairs(self, places: np.ndarray) -> Iterator[Block]:
        ranges = self._ranges(places)
        squares = None
        if len(ranges) > 1:  # a user's norm covers the cells of all blocks
            squares = np.concatenate(list(self._squares(places, 1 + len(ranges))))
        for first, last in ranges:
            width, user = cells_below(last) - cells_below(first), 0
            adding = Counters(width) if width <= min(COUNTERS, 4 * self._num_pairs) else Merging()
            for sequence, offsets, marks in self._chunks(len(ranges) + (squares is not None)):
                pairs = _pairs_of_range(places[sequence], offsets, first, last, marks)
                keys = [_keys(*pair, marks.bits) for pair in pairs]
                users = slice(user, user := user + len(offsets) - 1)
                own = None if squares is None else squares[users]
                adding.add(*_vectors(np.concatenate(keys), width, own, **marks.coded))
            for cells, sums in adding.results():
                yield cells + cells_below(first), sums

    @property
    def _num_pairs(self) -> int:
        """A bound on the number of pairs."""
        return WINDOW * int((self.stops - self.starts).sum())

    def occurrences(self, num_items: int) -> np.ndarray:
        """(num_items,) int64: how often each item occurs."""
        found = np.zeros(num_items, dtype=np.int64)
        for sequence, _, _ in self._chunks(0):
            found += np.bincount(sequence, minlength=num_items)
        return found

    def _ranges(self, places: np.ndarray) -> list[tuple[int, int]]:
        num_items = int(places.max(initial=-1)) + 1
        if self._num_pairs <= CELLS_AT_ONCE or num_items < 2:
            return [(0, num_items)]
        return ranges_of_places(places, self.occurrences(len(places)), CELLS_AT_ONCE, COUNTERS)

    def _squares(self, places: np.ndarray, passes: int) -> Iterator[np.ndarray]:
        """S of blocks of users, over all cells."""
        num_cells = cells_below(int(places.max(initial=-1)) + 1)
        for sequence, offsets, marks in self._chunks(passes):
            pairs = _pairs(places[sequence], offsets, num_cells, marks)
            keys = np.concatenate([_keys(*pair, marks.bits) for pair in pairs])
            users, _, values = _added_up_by_user(keys, num_cells, marks.bits)
            yield _squares_of(users, values, len(offsets) - 1)

    def pairs(self, places: np.ndarray, survivors: np.ndarray, directed: bool) -> np.ndarray:
        width = len(survivors) * (2 if directed else 1)
        sums = np.zeros(width, dtype=np.int64)
        if not width:
            return sums
        num_items = int(places.max(initial=-1)) + 1
        among = Among(survivors, cells_below(num_items), self._num_pairs)
        for sequence, offsets, marks in self._chunks():
            keys = []
            for users, cells, backward, codes, _ in _pairs(places[sequence], offsets, 0, marks):
                rows, place = among(cells)
                place = 2 * place + backward[rows] if directed else place
                codes = codes if isinstance(codes, int) else codes[rows]
                keys.append(_keys(users[rows], place, backward, codes, width, marks.bits))
            np.add.at(sums, *_vectors(np.concatenate(keys), width, **marks.coded))
        return sums

    def shared(self, near: np.ndarray, num_items: int) -> np.ndarray:
        sums, among = np.zeros(2, dtype=np.int64), Among(near, cells_below(num_items), self._num_pairs)
        for sequence, offsets, marks in self._chunks(0):
            keys = []
            for users, cells, backward, codes, _ in _pairs(sequence, offsets, 0, marks):
                other = np.ones(len(cells), dtype=np.int64)
                other[among(cells)[0]] = 0
                keys.append(_keys(users, other, backward, codes, 2, marks.bits))
            np.add.at(sums, *_vectors(np.concatenate(keys), 2, **marks.coded))
        return sums

    def _chunks(self, passes: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray, "_Marks"]]:
        """(items (n,) int64, offsets, marks) of blocks of users; `passes`: total number of passes, for progress."""
        lengths = self.stops - self.starts
        ends = np.cumsum(lengths)
        user = 0
        while user < self.num_users:
            base = ends[user] - lengths[user]
            stop = int(np.searchsorted(ends, base + ITEMS_AT_ONCE, side="right"))
            stop = min(max(stop, user + 1), self.num_users)  # at least one user
            offsets = np.concatenate([[0], ends[user:stop] - base])
            first, last = self.starts[user], self.stops[stop - 1]
            rows: slice | np.ndarray = slice(first, last)
            if last - first != offsets[-1]:  # held-out items lie between
                rows = np.arange(offsets[-1]) + np.repeat(self.starts[user:stop] - offsets[:-1], lengths[user:stop])
            weights, sessions = (None if of is None else np.asarray(of[rows]) for of in (self.weights, self.sessions))
            yield np.asarray(self.history[rows], dtype=np.int64), offsets, _Marks(weights, sessions)
            advance((stop - user) / passes if passes else 0)
            user = stop


def ranges_of_places(
    places: np.ndarray, occurrences: np.ndarray, at_once: int, counters: int = 0
) -> list[tuple[int, int]]:
    """Ranges of places: pairs whose higher place is in one range have at most `counters` cells, or at most `at_once`
    that occur, or the range is a single place. `occurrences` (num_items,) is how often each item occurs."""
    num_items = int(places.max(initial=-1)) + 1
    occurs = np.zeros(num_items, dtype=np.int64)
    occurs[places[places >= 0]] = occurrences[places >= 0]
    most = np.cumsum(np.minimum(2 * WINDOW * occurs, np.arange(num_items)))  # cells up to each higher place
    ranges, first = [], 0
    while first < num_items:
        before = int(most[first - 1]) if first else 0
        dense = place_below(cells_below(first) + counters)
        sparse = int(np.searchsorted(most, before + at_once, side="right"))
        last = min(max(first + 1, dense, sparse), num_items)
        ranges.append((first, last))
        first = last
    return ranges


def longest(weights: np.ndarray | None) -> int:
    """The maximum number of a user's (last) items: a public number."""
    return LONGEST if weights is None else LONGEST_WEIGHTED


_Codes = np.ndarray | int  # of pairs: what determines their weights (`_weights_of`); int: the same for all
_Pairs = tuple[np.ndarray, np.ndarray, np.ndarray, _Codes, int]


class _Marks(NamedTuple):
    """Weights and sessions of the interactions of a block, if they have any."""

    weights: np.ndarray | None
    sessions: np.ndarray | None

    @property
    def bits(self) -> int:
        """Bits for a code."""
        return _BITS if self.weights is None else _BITS + _WEIGHT_BITS

    @property
    def coded(self) -> dict[str, Any]:
        """The same as an argument, if it is not the usual number."""
        return {} if self.weights is None else {"bits": self.bits}

    def codes(self, later: np.ndarray, distance: int) -> _Codes:
        """The codes of pairs, from the rows of their later items."""
        return distance - 1 if self.weights is None else (self.weights[later].astype(np.int64) << _BITS) + distance - 1

    def apart(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray | bool:
        """Whether two interactions of a user are in different sessions."""
        return False if self.sessions is None else self.sessions[rows] != self.sessions[others]


def _weights_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Weights of pairs: that of the distance, times that of the later interaction, if there is one."""
    weights = np.array(WEIGHTS, dtype=np.int64)[codes & (1 << _BITS) - 1]
    return weights if bits == _BITS else weights * (codes >> _BITS)


def _pairs(sequence: np.ndarray, offsets: np.ndarray, width: int, marks: _Marks) -> Iterator[_Pairs]:
    """(users, unordered cells, whether from the higher to the lower, codes, width) for each distance."""
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    for distance in range(1, WINDOW + 1):
        first, second = sequence[:-distance], sequence[distance:]
        good = (first >= 0) & (second >= 0) & (first != second) & (users[:-distance] == users[distance:])
        rows = np.flatnonzero(good)
        if marks.sessions is not None:
            rows = rows[~marks.apart(rows, rows + distance)]
        first, second = first[rows], second[rows]
        high, codes = np.maximum(first, second), marks.codes(rows + distance, distance)
        yield users[rows], (high * (high - 1) >> 1) + np.minimum(first, second), first > second, codes, width


def _pairs_of_range(
    sequence: np.ndarray, offsets: np.ndarray, first: int, last: int, marks: _Marks
) -> Iterator[_Pairs]:
    """The pairs whose higher place lies in first … last - 1, with cells counted from the first of these.

    They are found from the positions of the higher place, so that the work is proportional to their number.
    """
    width = cells_below(last) - cells_below(first)
    if not first and last > int(sequence.max(initial=-1)):
        yield from _pairs(sequence, offsets, width, marks)
        return
    rows = np.flatnonzero((sequence >= first) & (sequence < last))
    users = np.searchsorted(offsets, rows, side="right") - 1
    high, begin, end = sequence[rows], offsets[users], offsets[users + 1]
    start = (high * (high - 1) >> 1) - cells_below(first)
    for distance in range(1, WINDOW + 1):
        for backward in (False, True):  # the higher place comes second, or first
            at = rows + distance if backward else rows - distance
            low = sequence.take(at, mode="clip")
            good = np.flatnonzero((at < end if backward else at >= begin) & (low >= 0) & (low < high))
            if marks.sessions is not None:
                good = good[~marks.apart(rows[good], at[good])]
            codes = marks.codes((at if backward else rows)[good], distance)
            yield users[good], start[good] + low[good], np.full(len(good), backward), codes, width


def _keys(
    users: np.ndarray, cells: np.ndarray, backward: np.ndarray, codes: _Codes, width: int, bits: int
) -> np.ndarray:
    """User, cell and code in one number, so that only numbers have to be sorted."""
    if len(users) and int(users[-1]).bit_length() + width.bit_length() + bits > 63:  # two users would collide
        raise DpformerError(f"{width:,} pairs of items are too many to count in memory: give --engine duckdb")
    return ((users << width.bit_length()) + cells << bits) + codes


def _vectors(keys: np.ndarray, width: int, squares: np.ndarray | None = None, bits: int = _BITS) -> Block:
    """(cells, q) of every user's vector, without zeros.

    Args:
        keys: see `_keys`.
        width: a bound above every cell.
        squares: S of each user; by default computed from the given cells.
        bits: bits of a code.
    """
    users, cells, values = _added_up_by_user(keys, width, bits)
    if squares is None:
        squares = _squares_of(users, values, int(users.max(initial=-1)) + 1)
    q = quantised(values, squares[users])
    there = np.flatnonzero(q)
    return cells[there], q[there]


def _added_up_by_user(keys: np.ndarray, width: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(users ascending, cells, v): weights of one cell of a user are added before the norm is computed."""
    if not len(keys):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    keys = np.sort(keys)
    weights = _weights_of(keys & (1 << bits) - 1, bits)
    keys >>= bits
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    cells = keys[starts]
    return cells >> width.bit_length(), cells & (1 << width.bit_length()) - 1, np.add.reduceat(weights, starts)


def _squares_of(users: np.ndarray, values: np.ndarray, num_users: int) -> np.ndarray:
    """(num_users,) int64: Σ v² of each user."""
    squares = np.zeros(num_users, dtype=np.int64)
    if len(users):
        owners = np.flatnonzero(np.append(True, users[1:] != users[:-1]))
        squares[users[owners]] = np.add.reduceat(values * values, owners)
    return squares


def gathered(blocks: Iterable[Block]) -> Block:
    """All blocks as one."""
    nothing = np.zeros(0, np.int64)
    cells, sums = zip((nothing, nothing), *blocks, strict=True)
    return np.concatenate(cells), np.concatenate(sums)
