r"""Noise on every cell of a huge table without visiting empty cells: exact thresholded sampling.

Of x_c + σ·N(0, 1), one number for each of n cells, only the cells above a threshold τ are needed. Nearly all x_c are 0,
and an empty cell passes with probability p = Q(τ/σ) = P(N(0, 1) > τ/σ), independently. So instead of n draws:

1. the cells that would pass if all were empty: the gaps between successes of independent trials are geometric,
   gap = ⌊ln u / ln(1 − p)⌋, u uniform; those on an occupied cell are dropped, since occupied cells draw for themselves;
2. their values, normal given that they pass: σ·Q⁻¹(u·p), u uniform;
3. the occupied cells, x_c + σ·N(0, 1), kept if above τ.

The result has the *same distribution* as noise on all n cells followed by the threshold, so it is the same Gaussian
mechanism (plus post-processing), in time and memory proportional to the occupied and surviving cells. All draws use the
secure generator. Values are rounded to the grid of `public_grid`; τ is placed halfway between two grid points, so that
rounding never crosses it.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import torch

from dpformer.accounting.arguments import positive, whole
from dpformer.noise.randomness import SecureRandom, public_grid

OCCUPIED, GAPS, TAIL = 0, 1, 2  # streams of one step of the generator
MOST_AT_ONCE = 2**20  # number of draws at a time
PASSED_AT_ONCE = 2**20  # number of passing empty cells at a time


def tail(x: float) -> float:
    """Q(x) = P(N(0, 1) > x)."""
    return 0.5 * math.erfc(x / math.sqrt(2))


def noisy_above(
    blocks: Iterable[tuple[np.ndarray, np.ndarray]],
    num_cells: int,
    *,
    deviation: float,
    threshold: float,
    random: SecureRandom,
    step: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The cells of a noisy table above a threshold: (cells (K,) int64 ascending, noisy values (K,) float64).

    Args:
        blocks: (cells (k,) int64, values (k,)): the non-zero cells of the table, and their values. Cells increase
            strictly, also between blocks; the division into blocks does not matter, and one is held at a time.
        num_cells: n; cells are 0..n-1.
        deviation: σ of the noise on every cell.
        threshold: τ, moved by less than one grid step.
        random: the secure source.
        step: the address of the draws; no other draw of `random` may use this step.
    """
    num_cells, deviation = whole("num_cells", num_cells, 0), positive("deviation", deviation)
    grid = public_grid(deviation)
    threshold = moved_threshold(threshold, grid)
    everywhere = _successes(num_cells, tail(threshold / deviation), random, step)
    found: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    occupied = visited = drawn = 0  # numbers of normal draws, successes and tails used so far
    for cells, values, end in _pieces(blocks, everywhere, num_cells):
        noisy = values + deviation * random.normal(len(cells), step=step, stream=OCCUPIED, start=occupied)
        noisy = np.round(noisy / grid) * grid
        passed = noisy > threshold
        until = int(np.searchsorted(everywhere, end))
        empty = everywhere[visited:until]
        empty = empty[~_among(empty, cells)]
        tails = deviation * _truncated_normal(len(empty), threshold / deviation, random, step, drawn)
        tails = np.maximum(np.round(tails / grid) * grid, threshold + grid / 2)  # a last-bit error must not fall below
        occupied, visited, drawn = occupied + len(cells), until, drawn + len(empty)
        order = np.argsort(there := np.concatenate([cells[passed], empty]), kind="stable")
        found[0].append(there[order])
        found[1].append(np.concatenate([noisy[passed], tails])[order])
    del everywhere
    return _joined(found[0]), _joined(found[1])


def _pieces(
    blocks: Iterable[tuple[np.ndarray, np.ndarray]], everywhere: np.ndarray, num_cells: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(cells, values, end of the piece): the blocks, then the rest, with few successes in each piece."""
    first = visited = 0
    filled = ((cells, values) for cells, values in blocks if len(cells))
    for cells, values in chain(filled, [(np.zeros(0, np.int64), np.zeros(0))]):
        if len(cells) and (cells[0] < first or cells[-1] >= num_cells or (np.diff(cells) <= 0).any()):
            raise ValueError(f"cells must increase strictly within 0..{num_cells - 1}")
        first = end = int(cells[-1]) + 1 if len(cells) else num_cells
        until = int(np.searchsorted(everywhere, end))
        while until - visited > PASSED_AT_ONCE:
            visited += PASSED_AT_ONCE
            cut = int(everywhere[visited])
            here = int(np.searchsorted(cells, cut))
            yield cells[:here], values[:here], cut
            cells, values = cells[here:], values[here:]
        visited = until
        yield cells, values, end


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Concatenate and free the parts."""
    joined = np.concatenate(parts)
    parts.clear()
    return joined


def moved_threshold(threshold: float, grid: float) -> float:
    """τ halfway between two grid points, so that rounding never crosses it."""
    return (math.floor(threshold / grid) + 0.5) * grid


def _successes(trials: int, p: float, random: SecureRandom, step: int) -> np.ndarray:
    """The successful ones of independent trials of probability p, ascending (int64), by geometric gaps."""
    if p >= 1:
        return np.arange(trials)
    if p <= 0:
        return np.zeros(0, np.int64)
    found: list[np.ndarray] = []
    last, start = -1, 0
    draws = 2 * min(int(0.6 * p * trials) + 16, MOST_AT_ONCE // 2)  # even: a block of the generator is two words
    while last < trials:
        uniform = _uniform(random.words(draws, step=step, stream=GAPS, start=start))
        gaps = np.minimum(np.floor(np.log(uniform) / math.log1p(-p)), trials)  # the cap: sums stay within int64
        found.append(last + np.cumsum(gaps.astype(np.int64) + 1))
        last, start = int(found[-1][-1]), start + draws
    positions = np.concatenate(found) if found else np.zeros(0, np.int64)
    return positions[: np.searchsorted(positions, trials)]


def _truncated_normal(count: int, low: float, random: SecureRandom, step: int, start: int = 0) -> np.ndarray:
    """(count,) standard normal numbers given that they exceed `low`: Q⁻¹(u·Q(low)); numbers from `start`."""
    uniform = torch.from_numpy(_uniform(random.words(count, step=step, stream=TAIL, start=start)))
    return -torch.special.ndtri(uniform * tail(low)).numpy()  # Q⁻¹(p) = −Φ⁻¹(p), accurate in the tail


def _uniform(words: np.ndarray) -> np.ndarray:
    """(0, 1] in steps of 2⁻⁶⁴."""
    return (words.astype(np.float64) + 1) * 2.0**-64


def _among(wanted: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Which of `wanted` occur in `ascending`, as a mask."""
    if not len(ascending):
        return np.zeros(len(wanted), dtype=bool)
    at = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    return np.asarray(ascending[at] == wanted)
