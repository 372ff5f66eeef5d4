"""From how often canaries were told apart to a lower bound on ε, with confidence.

Each canary takes part or not by the toss of a coin, and is then guessed: "it took part" if L_j > 0. Wrong guesses are
independent, so Clopper–Pearson bounds their rate p from above. Training at noise σ' allows no test to be better than

    2p ≥ 1 − TV(σ'),      TV the total variation distance between training with one user and without: δ at ε = 0,

so where 2p is less, σ' is more noise than there can be. The largest σ' that is left is the *effective noise*, and ε at
it is the lower bound. TV is that of the Poisson-sampled Gaussian (PLD, rounded up, which errs on the cautious side).
If the pipeline is as private as claimed, the bound exceeds the claim with a probability of at most 1 − confidence.

`assumption_free` uses 2p ≥ 2(1 − δ)/(1 + e^ε) instead, which holds for whatever is (ε, δ)-DP, and is looser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpformer.accounting.accountant import compose, epsilon_of, first_interval, quiet
from dpformer.accounting.arguments import whole
from dpformer.accounting.events import PoissonGaussian

LEAST_CANARIES = 100
RANGE = 16.0  # effective noise is looked for within this factor of the claim
PRECISION = 5e-4  # of the effective noise, relative; rounded up


def check_size(canaries: int, confidence: float) -> None:
    """Refuses an audit that could show nothing."""
    if whole("canaries", canaries, 1) < LEAST_CANARIES:
        raise ValueError(f"canaries is {canaries}; fewer than {LEAST_CANARIES} show nothing")
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must be at least 0.5 and below 1")


@dataclass(frozen=True)
class Guesses:
    """How canaries were guessed, and what the rate of errors is at most, with confidence."""

    false_positives: int
    non_members: int
    false_negatives: int
    members: int
    error_at_most: float

    @property
    def errors(self) -> int:
        return self.false_positives + self.false_negatives


def guess(scores: np.ndarray, member: np.ndarray, confidence: float) -> Guesses:
    """Guesses all canaries by the sign of their scores."""
    false_positives, false_negatives = int((scores[~member] > 0).sum()), int((scores[member] <= 0).sum())
    bound = clopper_pearson(false_positives + false_negatives, len(member), 1 - confidence)
    return Guesses(false_positives, int((~member).sum()), false_negatives, int(member.sum()), bound)


def clopper_pearson(errors: int, trials: int, allowed: float) -> float:
    """The exact upper bound on a rate: at any higher one, so few errors have a probability below `allowed`."""
    from scipy.stats import beta

    return 1.0 if errors == trials else float(beta.ppf(1 - allowed, errors + 1, trials - errors))


def effective_noise(error: float, claimed: PoissonGaussian) -> float:
    """The largest noise multiplier with which an error rate this low is possible; inf if it says nothing."""

    def possible(log_sigma: float) -> bool:
        event = PoissonGaussian(math.exp(log_sigma), claimed.sample_rate, claimed.steps)
        return 1 - 2 * error <= total_variation(event)

    if error >= 0.5:
        return math.inf
    claim, stride = math.log(claimed.noise_multiplier), 0.1
    low = high = claim
    while not possible(low):
        low, high, stride = low - stride, low, 2 * stride
        if low < claim - math.log(RANGE):
            return math.exp(low)
    while high == low or possible(high):
        low, high, stride = high, high + stride, 2 * stride
        if high > claim + math.log(RANGE):
            return math.inf
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return math.exp(high)


def total_variation(event: PoissonGaussian) -> float:
    """The total variation distance between training with one user and without, never below the truth."""
    from dp_accounting.pld import privacy_loss_distribution

    with quiet():
        loss = privacy_loss_distribution.from_gaussian_mechanism(
            event.noise_multiplier,
            value_discretization_interval=first_interval(compose([event]), 4.0),
            sampling_prob=event.sample_rate,
        )
        return float(loss.self_compose(event.steps).get_delta_for_epsilon(0.0))


def epsilon_at(noise_multiplier: float, claimed: PoissonGaussian, delta: float) -> float:
    """ε of the claimed training at another noise."""
    if math.isinf(noise_multiplier):
        return 0.0
    return epsilon_of([PoissonGaussian(noise_multiplier, claimed.sample_rate, claimed.steps)], delta)


def assumption_free(error: float, delta: float) -> float:
    """ε that any mechanism has at least with an error rate of at most this: ln((1 − δ)/p − 1)."""
    odds = (1 - delta) / error - 1
    return math.log(odds) if odds > 1 else 0.0
