r"""Canaries for transition counts: made-up users through the release itself, one pair of items each.

Canary j owns the pair {a, b} of its own and has the history a, b, b, …: only (a, b) is counted, with a weight that
scaling has to bring down to 1. So that every pair survives all rounds, others are on it, of whom the attacker knows.
Half of the canaries, chosen at random, take part. Of each pair the release shows a total and a difference of
directions,

    S_j = N_j + 1[j takes part] + s_S·N(0, 1),     D_j likewise with s_D,     1/s_S² = P_u + P_d/2,  1/s_D² = P_d/2,

P_u and P_d the shares of undirected and directed rounds over σ². Their mean, weighted by precision, has a deviation s
with 1/s² = P_u + P_d = 0.95/σ²: an attacker sees all of the budget but what is spent on popularity.
"""

from __future__ import annotations

import math

import numpy as np

from dpformer.engines.sums import GRID, WINDOW, ArraySums
from dpformer.queries.base import Canaries
from dpformer.queries.transitions.rounds import ITEMS, ROUNDS, release_transitions

CLEAR = 8.0  # deviations of the first round by which a pair is above its threshold


def items_for(canaries: int) -> int:
    """The fewest items with as many pairs as there are canaries."""
    return math.ceil((1 + math.sqrt(1 + 8 * canaries)) / 2)


def canaries(sigma: float, member: np.ndarray, seed: int | None) -> Canaries:
    """One release, with others on every pair besides the canaries of whom `member` take part."""
    undirected, directed = (sum(r.share for r in ROUNDS if r.directed is way) / sigma**2 for way in (False, True))
    deviations = np.array([(undirected + directed / 2) ** -0.5, (directed / 2) ** -0.5])
    items, known = items_for(len(member)), math.ceil(CLEAR * sigma / math.sqrt(ROUNDS[0].share)) + 10
    pairs = np.array([(a, b) for b in range(items) for a in range(b)])  # in the order of their cells
    histories = np.repeat(pairs[:, 1:], WINDOW + 1, axis=1)
    histories[:, 0] = pairs[:, 0]  # a, b, b, …: loud
    flat = np.concatenate([np.repeat(pairs, known, axis=0).ravel(), histories[member].ravel()])
    lengths = np.concatenate([np.full(len(pairs) * known, 2), np.full(int(member.sum()), WINDOW + 1)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    release = release_transitions(flat, offsets, items, sigma, seed=seed)
    if not np.array_equal(release.items[release.pairs], pairs):
        raise ArithmeticError("a pair of many users did not survive: the rounds do not do what they say")
    both = np.stack([release.total, release.difference]) - known
    weights = deviations**-2.0
    exact = ArraySums.packed(flat, offsets).items(items) / GRID
    popularity = (release.frequencies.counts - exact) / (sigma / math.sqrt(ITEMS.share))
    return Canaries(
        estimate=weights @ both / weights.sum(),
        deviation=float((undirected + directed) ** -0.5),
        noise=both / deviations[:, None],
        others={"noise: round of items": popularity},
    )
