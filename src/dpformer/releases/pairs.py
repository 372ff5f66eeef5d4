r"""What one user says about transitions: weighted pairs of items, scaled to an L2 norm of at most 1.

A history x_1, …, x_n gives a pair (x_t, x_{t+k}) for every t and k = 1..WINDOW, of weight DECAY^{k−1}; pairs of an item
with itself say nothing and are left out. A pair belongs to a *cell*, as the round of the release sees it:

    unordered   {a, b}  cell  b(b−1)/2 + a  for a < b: dense, 0 … m(m−1)/2 − 1 over m items
    directed    (a, b)  cell  2·(place of {a, b} among the surviving pairs) + [a > b]

A user's vector v_u holds in each cell the sum of the weights of the user's pairs there, and what is counted is
v_u/‖v_u‖₂: sensitivity 1, whatever the user did. Duplicates must be merged *before* the norm is taken: a pair that
occurs r times is one coordinate r·w, not r coordinates w. Users are independent: they come in chunks of bounded size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

WINDOW, DECAY = 12, 0.88
ITEMS_AT_ONCE = 2**18  # of the histories: 3 million pairs
SLACK = 1 + 1e-9  # floating point must not lift a norm above 1


@dataclass(frozen=True)
class Pairs:
    """Pairs of some users, one row each: who, from which item to which (places among the m items), how much."""

    users: np.ndarray  # (n,) int64, from 0 within the chunk
    first: np.ndarray  # (n,) int64
    second: np.ndarray  # (n,) int64
    weights: np.ndarray  # (n,) float64

    def unordered_cells(self) -> np.ndarray:
        low, high = np.minimum(self.first, self.second), np.maximum(self.first, self.second)
        return high * (high - 1) // 2 + low

    def kept(self, rows: np.ndarray) -> "Pairs":
        return Pairs(self.users[rows], self.first[rows], self.second[rows], self.weights[rows])


def pairs_of_users(items: np.ndarray, offsets: np.ndarray, places: np.ndarray) -> Iterator[Pairs]:
    """The pairs of all users, some users at a time.

    Args:
        items: (n,) items of all users, user u's at items[offsets[u]:offsets[u + 1]].
        offsets: (users + 1,) int64.
        places: (num_items,) int64, the place of an item among the m that count, -1 for others. Those are skipped over,
            but count as steps: distance is in the history as it is.
    """
    num_users, start = len(offsets) - 1, 0
    while start < num_users:
        stop = int(np.searchsorted(offsets, offsets[start] + ITEMS_AT_ONCE, side="right")) - 1
        stop = min(max(stop, start + 1), num_users)  # one user at least
        bounds = offsets[start : stop + 1]
        yield _pairs(places[items[bounds[0] : bounds[-1]]], bounds - bounds[0])
        start = stop


def _pairs(sequence: np.ndarray, offsets: np.ndarray) -> Pairs:
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    parts = []
    for distance in range(1, WINDOW + 1):
        first, second = sequence[:-distance], sequence[distance:]
        rows = np.flatnonzero(
            (first >= 0) & (second >= 0) & (first != second) & (users[:-distance] == users[distance:])
        )
        weights = np.full(len(rows), DECAY ** (distance - 1))
        parts.append((users[rows], first[rows], second[rows], weights))
    who, first, second, weights = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Pairs(who, first.astype(np.int64), second.astype(np.int64), weights)


def scaled(users: np.ndarray, cells: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """v_u/‖v_u‖ of every user: (users, cells, values), each (user, cell) once.

    Args:
        users: (n,) int64, the user of each pair.
        cells: (n,) int64, its cell.
        weights: (n,) float64, positive.
    """
    width = int(cells.max(initial=0)) + 1
    order = np.argsort(users * width + cells)
    users, cells, weights = users[order], cells[order], weights[order]
    new = np.ones(len(users), dtype=bool)
    new[1:] = (users[1:] != users[:-1]) | (cells[1:] != cells[:-1])
    starts = np.flatnonzero(new)
    users, cells = users[starts], cells[starts]
    values = np.add.reduceat(weights, starts) if len(starts) else weights
    norms = np.sqrt(np.bincount(users, weights=values * values))
    return users, cells, values / (norms[users] * SLACK)
