r"""The audit of transition counts: canaries through the release itself, one pair of items each.

Canary j owns the pair {a, b} of its own and has the history a, b, b, …: only (a, b) is counted, with a weight that
scaling has to bring down to 1. So that every pair survives all rounds, others are on it, of whom the attacker knows.
Half of the canaries, by the toss of coins, take part. Of each pair the release shows a total and a difference of
directions,

    S_j = N_j + 1[j takes part] + s_S·N(0, 1),     D_j likewise with s_D,     1/s_S² = P_u + P_d/2,  1/s_D² = P_d/2,

P_u and P_d the shares of undirected and directed rounds over σ². Their mean, weighted by precision, has a deviation s
with 1/s² = P_u + P_d = 0.95/σ²: an attacker sees all of the budget but what is spent on popularity.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from dpformer.accounting.arguments import delta_of, positive
from dpformer.accounting.events import PoissonGaussian
from dpformer.engines.sums import GRID, WINDOW, ArraySums
from dpformer.queries.counts import ITEMS, ROUNDS, TransitionRelease, release_transitions
from dpformer.verification.audit.bound import assumption_free, check_size, effective_noise, epsilon_at, guess
from dpformer.verification.audit.checks import (
    another_run,
    contribution_checks,
    distribution_checks,
    spread_check,
    told_apart,
)
from dpformer.verification.audit.observation import Mechanism
from dpformer.verification.audit.result import Audit

CLEAR = 8.0  # deviations of the first round by which a pair is above its threshold


class Seen(NamedTuple):
    """What one release shows, less what the attacker knows."""

    standard: np.ndarray  # (2, canaries): totals and differences over their deviations
    estimate: np.ndarray  # (canaries,): the two as one
    popularity: np.ndarray  # (items,): noise of the round of items, over its deviation


def audit_counts(
    *, noise_multiplier: float, delta: float, canaries: int = 10_000, confidence: float = 0.95, seed: int | None = None
) -> Audit:
    """Releases counts of canaries and compares what that gives away with one Gaussian event of `noise_multiplier`."""
    began = time.monotonic()
    check_size(canaries, confidence)
    sigma, delta = positive("noise_multiplier", noise_multiplier), delta_of(delta)
    undirected, directed = (sum(r.share for r in ROUNDS if r.directed is way) / sigma**2 for way in (False, True))
    deviations = (undirected + directed / 2) ** -0.5, (directed / 2) ** -0.5
    deviation = (undirected + directed) ** -0.5
    items = math.ceil((1 + math.sqrt(1 + 8 * canaries)) / 2)
    member = np.random.default_rng(seed).random(items * (items - 1) // 2) < 0.5
    known = math.ceil(CLEAR * sigma / math.sqrt(ROUNDS[0].share)) + 10
    seen = _look(member, items, known, sigma, deviations, seed)
    scores = (2 * seen.estimate - 1) / (2 * deviation**2)
    claimed = PoissonGaussian(sigma, 1.0, 1)
    guesses = guess(scores, member, confidence)
    noise = effective_noise(guesses.error_at_most, claimed)
    added = seen.estimate[member]
    around = float(np.square((added - 1) / deviation).sum())
    checks = [
        told_apart(guesses, claimed),
        spread_check("noise: round of items", seen.popularity),
        *distribution_checks(seen.standard[:, ~member], sigma),
        *contribution_checks((float(added.mean()), deviation / math.sqrt(len(added))), (around, len(added))),
    ]
    if seed is None:
        again = _look(member, items, known, sigma, deviations, seed)
        checks.append(another_run(seen.standard[0, ~member], again.standard[0, ~member]))
    return Audit(
        mechanism=Mechanism(sigma, 1.0, 1),
        delta=delta,
        epsilon_claimed=epsilon_at(sigma, claimed, delta),
        epsilon_lower=epsilon_at(noise, claimed, delta),
        epsilon_lower_any=assumption_free(guesses.error_at_most, delta),
        effective_noise=noise,
        confidence=confidence,
        guesses=guesses,
        checks=tuple(checks),
        seconds=time.monotonic() - began,
        scores=scores,
        member=member,
        of="transition counts",
    )


def _look(
    member: np.ndarray, items: int, known: int, sigma: float, deviations: tuple[float, float], seed: int | None
) -> Seen:
    """One release, with `known` users on every pair besides the canaries."""
    pairs = np.array([(a, b) for b in range(items) for a in range(b)])  # in the order of their cells
    histories = np.repeat(pairs[:, 1:], WINDOW + 1, axis=1)
    histories[:, 0] = pairs[:, 0]  # a, b, b, …: loud
    flat = np.concatenate([np.repeat(pairs, known, axis=0).ravel(), histories[member].ravel()])
    lengths = np.concatenate([np.full(len(pairs) * known, 2), np.full(int(member.sum()), WINDOW + 1)])
    release = release_transitions(flat, np.concatenate([[0], np.cumsum(lengths)]), items, sigma, seed=seed)
    if not np.array_equal(_pairs(release), pairs):
        raise ArithmeticError("a pair of many users did not survive: the rounds do not do what they say")
    both = np.stack([release.total, release.difference]) - known
    weights = np.array(deviations) ** -2.0
    exact = ArraySums.packed(flat, np.concatenate([[0], np.cumsum(lengths)])).items(items) / GRID
    popularity = (release.frequencies.counts - exact) / (sigma / math.sqrt(ITEMS.share))
    return Seen(both / np.array(deviations)[:, None], weights @ both / weights.sum(), popularity)


def _pairs(release: TransitionRelease) -> np.ndarray:
    return np.asarray(release.items[release.pairs])
