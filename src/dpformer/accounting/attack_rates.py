r"""What ε means for one person: how many members a membership attack can find, and how precise it can be.

An attacker decides whether a given user was in the data. At a false positive rate of at most α, (ε, δ)-differential
privacy bounds its true positive rate by

    TPR ≤ min(e^ε·α + δ,  1 − e^{−ε}·(1 − δ − α))

(Kairouz, Oh and Viswanath 2015). A mechanism is (ε, δ(ε))-private for *every* ε at once. Its privacy loss distribution
gives the whole curve, and the smallest of all these bounds holds, which is far below the bound from the stated ε alone.

If a share π of the candidates are members, the precision of the attack is at most π·TPR / (π·TPR + (1 − π)·α).
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dpformer.accounting.accountant import Composition, compose, epsilon_of, first_interval, quiet
from dpformer.accounting.arguments import delta_of, not_negative
from dpformer.accounting.events import Event
from dpformer.accounting.searches import Search, curve_of_search

FALSE_ALARMS = 0.01  # usual in the literature on membership inference (Carlini et al. 2022)
PRIORS = (0.5, 0.01)
POINTS = 200  # points of the curve δ(ε)
Curve = Sequence[tuple[float, float]]  # (ε, δ(ε))


class AttackRates(NamedTuple):
    """Upper bounds for every attack, now or later, whatever else it knows."""

    false_positive_rate: float
    true_positive_rate: float  # at most this share of the members is found
    precisions: dict[float, float]  # share of members among the candidates → bound on the precision

    def to_dict(self) -> dict[str, Any]:
        return {
            "false_positive_rate": self.false_positive_rate,
            "true_positive_rate": self.true_positive_rate,
            "precision": {f"{prior:g}": value for prior, value in self.precisions.items()},
        }


def attack_rates(events: Iterable[Event], delta: float, false_positive_rate: float = FALSE_ALARMS) -> AttackRates:
    """Attack rates for everything that these events release together; the curve is followed up to the ε at `delta`.

    >>> from dpformer.accounting import Gaussian
    >>> round(attack_rates([Gaussian(1.0)], 1e-5).true_positive_rate, 3)  # Φ(Φ⁻¹(0.01) + 1)
    0.092
    """
    events = [event for event in events if event.repeats]
    epsilon = epsilon_of(events, delta)
    if not events or not math.isfinite(epsilon):
        return rates_of([(epsilon, 0.0)], false_positive_rate)
    failure = sum(event.repeats * event.failure for event in events)
    points = [(e, min(1.0, d + failure)) for e, d in _curve(tuple(compose(events)), epsilon)]
    return rates_of([*points, (epsilon, delta)], false_positive_rate)


def attack_rates_at(epsilon: float, delta: float, false_positive_rate: float = FALSE_ALARMS) -> AttackRates:
    """Attack rates from a single (ε, δ), which are looser."""
    return rates_of([(not_negative("epsilon", epsilon), delta_of(delta))], false_positive_rate)


def attack_rates_of_search(search: Search, delta: float, false_positive_rate: float = FALSE_ALARMS) -> AttackRates:
    """Attack rates for the best of a random number of repetitions, from its curve by Rényi accounting."""
    return rates_of(curve_of_search(search, delta), false_positive_rate)


def rates_of(curve: Curve, false_positive_rate: float) -> AttackRates:
    """Attack rates from points of a curve, each of which gives a bound."""
    alarms = delta_of(false_positive_rate, "false_positive_rate")
    found = min(_most_found(epsilon, delta, alarms) for epsilon, delta in curve)
    return AttackRates(alarms, found, {prior: _precision(found, alarms, prior) for prior in PRIORS})


def _most_found(epsilon: float, delta: float, alarms: float) -> float:
    above = math.exp(min(epsilon, 700.0)) * alarms + delta
    below = 1 - math.exp(-epsilon) * max(0.0, 1 - delta - alarms)
    return min(1.0, above, below)


def _precision(found: float, alarms: float, prior: float) -> float:
    return prior * found / (prior * found + (1 - prior) * alarms)


@lru_cache(maxsize=256)
def _curve(composition: tuple[Any, ...], highest: float) -> list[tuple[float, float]]:
    """Points (ε, δ(ε)) up to the highest ε, where δ is never underestimated."""
    import dp_accounting

    events: Composition = list(composition)
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=first_interval(events, highest))
    with quiet():
        for event, count in events:
            accountant.compose(event, count)
        return [(float(e), float(accountant.get_delta(e))) for e in np.linspace(0.0, highest, POINTS)]
