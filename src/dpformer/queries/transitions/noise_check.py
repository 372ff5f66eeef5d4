"""Check of transition counts against the data: each round has the noise in the ledger, and the model follows from it.

Round r ≥ 1 gives every pair in play its exact count x (each user scaled over the pairs in play) plus σ_r·N(0, 1), and
the pairs in play were chosen before its noise was drawn: Σ ((noisy − x)/σ_r)² is χ². The first round holds only pairs
above its threshold τ: given that it exceeded τ, u = Q((noisy − x)/σ)/Q((τ − x)/σ) is uniform, and the number of such
pairs is a sum of independent trials with p = Q((τ − x)/σ).

Recomputed from these numbers by the rules of the release, the pairs and their estimates must be those of the model.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats
from scipy.special import ndtr

from dpformer.data.near_pairs import chance_of
from dpformer.engines.sums import GRID, Sums
from dpformer.noise.randomness import public_grid
from dpformer.noise.sparse import moved_threshold
from dpformer.queries.base import ALARM
from dpformer.queries.items import passed_noise
from dpformer.queries.transitions.attribute_evidence import AttributeEvidence
from dpformer.queries.transitions.rounds import (
    ROUNDS,
    RoundRelease,
    TransitionRelease,
    deviation_of,
    first_threshold,
    retraced,
)


def wrong_with_rounds(found: TransitionRelease, sums: Sums, places: np.ndarray, sigma: float) -> str:
    """What is wrong with the stored rounds; empty if nothing.

    Args:
        found: the release.
        sums: sums of the data.
        places: (num_items,) the index of each item of the data among the selected ones, -1 for others.
        sigma: the noise multiplier of the rounds of pairs.
    """
    for one in found.rounds:
        deviation = deviation_of(ROUNDS[one.number], sigma)
        if (one.noisy / public_grid(deviation) % 1).any():
            return f"round {one.number + 1} is not on the grid of its noise"
        p = (
            _first(one, sums, places, len(found.items), deviation)
            if one.number == 0
            else _later(one, sums, places, sigma)
        )
        if p < ALARM:
            return f"round {one.number + 1} does not have the noise in the ledger"
    return "" if _follow(found, sigma) else "totals and differences do not follow from the rounds"


def wrong_with_evidence(found: AttributeEvidence, sums: Sums, near: np.ndarray, num_items: int) -> str:
    """What is wrong with the evidence for attributes whose near pairs are given; empty if nothing."""
    if found.chance != chance_of(near, num_items):
        return "the number of near pairs of the evidence for attributes is not that of the catalogue"
    noise = (found.sums - sums.shared(near, num_items) / GRID) / found.deviation
    return "" if _spread(noise) >= ALARM else "the evidence for attributes does not have the noise in the ledger"


def _later(one: RoundRelease, sums: Sums, places: np.ndarray, sigma: float) -> float:
    this = ROUNDS[one.number]
    exact = sums.pairs(places, one.cells, this.directed) / GRID
    return _spread((one.noisy - exact) / deviation_of(this, sigma))


def _first(one: RoundRelease, sums: Sums, places: np.ndarray, m: int, deviation: float) -> float:
    """Twice the smaller of two p-values: of the noise of pairs above the threshold, and of their number."""
    threshold = moved_threshold(first_threshold(m) * deviation, public_grid(deviation))
    chance = float(ndtr(-threshold / deviation))  # probability that a pair without data exceeds the threshold
    exact, num_cells = np.zeros(len(one.cells)), m * (m - 1) // 2
    expected, variance = num_cells * chance, num_cells * chance * (1 - chance)
    for cells, counted in sums.all_pairs(places):
        if not len(cells):
            continue
        counts = counted / GRID
        here = slice(*np.searchsorted(one.cells, [cells[0], cells[-1] + 1]))
        found = np.searchsorted(cells, one.cells[here])
        exact[here] = np.where(cells[found] == one.cells[here], counts[found], 0.0)
        chances = ndtr((counts - threshold) / deviation)
        expected += float((chances - chance).sum())
        variance += float((chances * (1 - chances) - chance * (1 - chance)).sum())
    excess = (abs(len(one.cells) - expected) - 0.5) / math.sqrt(max(variance, 1e-9))
    many = math.erfc(excess / math.sqrt(2)) if excess > 0 else 1.0
    if variance < 25:  # too few trials for the normal approximation: Bernstein's bound, which always holds
        far = max(abs(len(one.cells) - expected), 0.0)
        many = min(1.0, 2 * math.exp(-(far**2) / (2 * variance + 2 * far / 3))) if far else 1.0
    noise = passed_noise(one.noisy, exact, deviation, threshold)
    return min(1.0, 2 * min(many, _spread(noise)))


def _spread(noise: np.ndarray) -> float:
    """p-value of Σ x² under χ², two-sided."""
    if not len(noise):
        return 1.0
    squares = float(np.square(noise).sum())
    return 2 * min(float(stats.chi2.cdf(squares, len(noise))), float(stats.chi2.sf(squares, len(noise))))


def _follow(found: TransitionRelease, sigma: float) -> bool:
    """Recompute, if all rounds are stored; otherwise check that the last one holds the pairs of the model."""
    low, high = found.pairs.T
    cells = high * (high - 1) // 2 + low
    if len(found.rounds) < len(ROUNDS):
        last = found.rounds[-1] if found.rounds else None
        return last is None or last.number != len(ROUNDS) - 1 or np.array_equal(last.cells, cells)
    again = retraced(found.rounds, sigma)
    return (
        again is not None
        and np.array_equal(again.cells, cells)
        and np.array_equal(again.total(), found.total)
        and np.array_equal(again.difference(), found.difference)
    )
