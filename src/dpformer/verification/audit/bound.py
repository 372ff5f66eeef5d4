"""A lower bound on ε, with confidence, from how often canaries were distinguished.

Each canary takes part or not by a coin flip, and is then guessed: "it took part" if L_j > 0. Clopper–Pearson bounds the
rate p of wrong guesses from above. With a share s of the claimed noise, no test can do better than

    2p ≥ 1 − TV(s),      TV the total variation distance between releases with one user and without: δ at ε = 0,

so if 2p is smaller, s is more noise than is possible. The largest remaining s gives the lower bound: ε of the same
events with that noise. TV is computed from the privacy loss distribution (rounded up, which is conservative).

**Assumptions**: guesses of different canaries are wrong independently of one another. They are if each has its own
coordinates with independent noise, which the checks test; and the bound applies to *this kind* of mechanism. Without
these assumptions, many canaries in one run show less, by a term in δ: `any_mechanism`.

If the pipeline is as private as claimed, either bound exceeds the claim with a probability of at most 1 − confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from dpformer.accounting.accountant import compose, epsilon_of, first_interval, quiet
from dpformer.accounting.arguments import whole
from dpformer.accounting.events import Event, PoissonGaussian

LEAST_CANARIES = 100
RANGE = 16.0  # the remaining noise is searched within this factor of the claim
GUESSED = 0.05  # share of canaries guessed for the assumption-free bound: those with the most extreme scores
PRECISION = 5e-4  # relative precision of the remaining noise, rounded up


E = TypeVar("E", bound=Event)


def check_size(canaries: int, confidence: float) -> None:
    """Refuse an audit that could show nothing."""
    if whole("canaries", canaries, 1) < LEAST_CANARIES:
        raise ValueError(f"canaries is {canaries}; fewer than {LEAST_CANARIES} show nothing")
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must be at least 0.5 and below 1")


@dataclass(frozen=True)
class Guesses:
    """Number of wrong guesses of canaries, and an upper bound on their rate, with confidence."""

    false_positives: int
    non_members: int
    false_negatives: int
    members: int
    error_at_most: float

    @property
    def errors(self) -> int:
        return self.false_positives + self.false_negatives


def guess(scores: np.ndarray, member: np.ndarray, confidence: float) -> Guesses:
    """Guess all canaries by the sign of their scores."""
    false_positives, false_negatives = int((scores[~member] > 0).sum()), int((scores[member] <= 0).sum())
    bound = clopper_pearson(false_positives + false_negatives, len(member), 1 - confidence)
    return Guesses(false_positives, int((~member).sum()), false_negatives, int(member.sum()), bound)


def clopper_pearson(errors: int, trials: int, allowed: float) -> float:
    """The exact upper bound on a rate: at any higher one, so few errors have a probability below `allowed`."""
    from scipy.stats import beta

    return 1.0 if errors == trials else float(beta.ppf(1 - allowed, errors + 1, trials - errors))


def noise_left(error: float, claimed: Sequence[PoissonGaussian]) -> float:
    """The largest share of the claimed noise for which an error rate this low is possible; inf if uninformative."""

    def possible(log_share: float) -> bool:
        return 1 - 2 * error <= total_variation(scaled(claimed, math.exp(log_share)))

    if error >= 0.5:
        return math.inf
    stride, low, high = 0.1, 0.0, 0.0
    while not possible(low):
        low, high, stride = low - stride, low, 2 * stride
        if low < -math.log(RANGE):
            return math.exp(low)
    while high == low or possible(high):
        low, high, stride = high, high + stride, 2 * stride
        if high > math.log(RANGE):
            return math.inf
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return math.exp(high)


def scaled(events: Sequence[E], share: float) -> list[E]:
    """The events with their noise scaled by a factor."""
    return [replace(event, noise_multiplier=share * event.noise_multiplier) for event in events]


def total_variation(events: Sequence[PoissonGaussian]) -> float:
    """The total variation distance between the releases with and without one user: δ at ε = 0, never
    underestimated."""
    import dp_accounting

    composition = compose(events)
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=first_interval(composition, 4.0))
    with quiet():
        for event, count in composition:
            accountant.compose(event, count)
        return float(accountant.get_delta(0.0))


def epsilon_at(share: float, events: Sequence[Event], delta: float) -> float:
    """ε of the events with their noise scaled by a factor."""
    return 0.0 if math.isinf(share) else epsilon_of(scaled(events, share), delta)


def any_mechanism(scores: np.ndarray, member: np.ndarray, delta: float, confidence: float) -> float:
    """A lower bound on ε of *any* (ε, δ)-private mechanism, from one run with many canaries (Steinke et al. 2023).

    Canaries may depend on one another. The `GUESSED` share with the largest |score| is guessed, and v of these r
    guesses are right. Under (ε, δ)-DP that has probability at most

        P[B ≥ v] + 2·m·δ·max_i (P[v − i ≤ B < v] / i),     B ~ Binomial(r, e^ε/(1 + e^ε))

    (their Theorem 5.2), m the number of canaries. The term in m·δ is the price of dependence.
    """
    count = max(1, int(GUESSED * len(scores)))
    guessed = np.argsort(-np.abs(scores), kind="stable")[:count]
    right = int(((scores[guessed] > 0) == member[guessed]).sum())
    low, high = 0.0, 0.0
    while high < 50 and chance_of_so_many(right, count, len(scores), high, delta) <= 1 - confidence:
        low, high = high, high + 1
    while high - low > 1e-3:
        middle = (low + high) / 2
        possible = chance_of_so_many(right, count, len(scores), middle, delta) > 1 - confidence
        low, high = (low, middle) if possible else (middle, high)
    return low


def chance_of_so_many(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of this many right guesses under (ε, δ)-DP."""
    from scipy import stats

    p = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(right - 1, guesses, p))
    if not right:
        return 1.0
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, p))  # P[v − i ≤ Binomial < v]
    alpha = float((below / np.arange(1, right + 1)).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)
