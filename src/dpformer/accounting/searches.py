"""ε of searches: the best of a random number of repetitions, alone or together with other events, by Rényi accounting.

If the number of repetitions is drawn from the logarithmic distribution and only the best one is seen, selection costs
far less than publishing all of them (Papernot and Steinke 2022; `RepeatAndSelectDpEvent`). The bound is on Rényi
divergences, which add up with those of other events; there is no such bound for privacy loss distributions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpformer.accounting.accountant import compose, quiet
from dpformer.accounting.arguments import delta_of
from dpformer.accounting.events import Event

if TYPE_CHECKING:
    from dp_accounting.rdp import RdpAccountant


class Search(NamedTuple):
    """The best of a random number of repetitions."""

    events: tuple[Event, ...]  # events of one repetition, including its score
    mean_runs: float  # expected number of repetitions


def epsilon_with_searches(events: Iterable[Event], searches: Sequence[Search], delta: float) -> float:
    """ε at this δ of events and searches together; inf if there is no bound."""
    events = [event for event in events if event.repeats]
    tried = [event for search in searches for event in search.events]
    delta = delta_of(delta) - sum(event.repeats * event.failure for event in events)
    if delta <= 0 or any(event.noise_multiplier == 0 for event in (*events, *tried)):
        return math.inf
    if any(event.failure for event in tried):  # selection increases it, by an amount that is not derived here
        return math.inf
    with quiet():
        return _asked(_accountant(events, searches), delta, searches)


def curve_of_search(search: Search, delta: float) -> list[tuple[float, float]]:
    """(ε, δ) of one search for several δ, of which this one is the smallest."""
    if any(event.failure or event.noise_multiplier == 0 for event in search.events):
        return [(math.inf, 1.0)]
    with quiet():
        accountant = _accountant([], [search])
        deltas = [delta, *(10.0**-k for k in range(8, 0, -1) if delta < 10.0**-k)]
        return [(_asked(accountant, at, [search]), at) for at in deltas]


def _accountant(events: list[Event], searches: Sequence[Search]) -> RdpAccountant:
    from dp_accounting import dp_event, rdp

    accountant = rdp.RdpAccountant()
    for once, count in compose(events):
        accountant.compose(once, count)
    for search in searches:
        repetition = dp_event.ComposedDpEvent(
            [dp_event.SelfComposedDpEvent(event.once(), event.compositions) for event in search.events]
        )
        accountant.compose(dp_event.RepeatAndSelectDpEvent(repetition, search.mean_runs, 0.0))
    return accountant


def _asked(accountant: RdpAccountant, delta: float, searches: Sequence[Search]) -> float:
    epsilon = float(accountant.get_epsilon(delta))
    if not epsilon >= 0:
        means = ", ".join(f"{search.mean_runs}" for search in searches)
        raise ArithmeticError(f"the accountant has no answer ({epsilon}) for {means} runs")
    return epsilon


def repeated_epsilon(events: Sequence[Event], mean_runs: float, delta: float) -> float:
    """ε of one search."""
    return epsilon_with_searches((), [Search(tuple(events), mean_runs)], delta)
