"""The budget of a data set over many runs: what is spent, what still fits, and the share of each run of a plan.

All of it is the composition of events by the accountant. A plan of R runs says that each run takes at most its share:
run k is refused if what was spent before, and it R − k + 1 times (itself and all that are to come), is beyond ε. So a
run that takes less leaves more to those after it, and no mixture of kinds can exceed the budget. Of R Gaussian releases
each share grows like ε/√R, where naive division gives ε/R.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.events import Event
from dpformer.accounting.searches import Search, epsilon_with_searches
from dpformer.errors import DpformerError
from dpformer.format_number import plain

MOST_RUNS = 10_000  # that are counted as still fitting
CLOSE = 1e-3  # of a share, relative
NO_PLAN = "the ledger has no plan that says a run's share: give --epsilon, or make one with dpformer ledger plan"


@dataclass(frozen=True)
class Budget:
    """What a ledger file holds."""

    epsilon: float
    delta: float
    runs: tuple[dict[str, Any], ...] = ()
    plan: int | None = None  # how many runs there are to be; None: not planned
    planned_after: int = 0  # runs that were there when the plan was made
    number: int = 0  # of the last entry
    hash: str = ""

    @property
    def spent(self) -> float:
        """ε of all runs together, at the ledger's δ."""
        return self.spent_with(())

    def spent_with(self, events: Sequence[Event], mean_runs: float | None = None, times: int = 1) -> float:
        """The same with another run so many times; with `mean_runs` it is a search."""
        ordinary = [event for run in self.runs if "mean_runs" not in run for event in events_of(run)]
        searches = [Search(tuple(events_of(run)), run["mean_runs"]) for run in self.runs if "mean_runs" in run]
        if mean_runs is None:
            ordinary += list(events) * times
        else:
            searches += [Search(tuple(events), mean_runs)] * times
        if searches:
            return epsilon_with_searches(ordinary, searches, self.delta)
        return epsilon_of(ordinary, self.delta) if ordinary else 0.0

    @property
    def left(self) -> int | None:
        """Runs of the plan that are still to come; None without one."""
        return None if self.plan is None else max(0, self.plan - (len(self.runs) - self.planned_after))

    def alone(self, run: dict[str, Any]) -> float:
        """ε of one of the runs by itself, at the ledger's δ."""
        return Budget(self.epsilon, self.delta, (run,)).spent

    def fits(self, run: dict[str, Any]) -> int:
        """How many more runs like one of these fit into the budget."""
        events, means = events_of(run), run.get("mean_runs")

        def within(times: int) -> bool:
            return self.spent_with(events, means, times) <= self.epsilon

        low, high = 0, 1
        while high <= MOST_RUNS and within(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle) else (low, middle)
        return low if self.left is None else min(low, self.left)

    def share(self, planned: Callable[[float], Sequence[Event]]) -> float:
        """The largest ε of a run such that it, and all that are still to come like it, are within the budget.

        Args:
            planned: the events of a run with this ε of its own.
        """
        left = self.left
        if not left:
            raise DpformerError(NO_PLAN if left is None else self._all_taken())

        def within(epsilon: float) -> bool:
            return self.spent_with(planned(epsilon), times=left) <= self.epsilon

        low = self.epsilon / math.sqrt(left)
        while not within(low):
            low /= 2
            if low < 1e-6:
                raise DpformerError(f"nothing is left of ε = {plain(self.epsilon)} for another run")
        high = 2 * low
        while within(high):
            low, high = high, 2 * high
        while high > low * (1 + CLOSE):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if within(middle) else (low, middle)
        return rounded_down(low)

    def _all_taken(self) -> str:
        return f"all {self.plan} runs of the plan are taken"

    def refusal(self, events: Sequence[Event], mean_runs: float | None = None) -> str:
        """Why another run would break the plan; nothing if it would not."""
        if self.left is None:
            return ""
        if not self.left:
            return f"{self._all_taken()}: make a ledger for a further period, with a budget of its own, or stop here"
        total = self.spent_with(events, mean_runs, self.left)
        if total <= self.epsilon:
            return ""
        return (
            f"this run takes more than its share: {self.left} of {self.plan} runs are left, and if each took as much "
            f"it would be ε = {plain(total)} of {plain(self.epsilon)}; leave --epsilon out to have its share"
        )

    def facts(self) -> dict[str, Any]:
        """What a statement says of it: with number and hash of its last entry, which is this run's."""
        known = {"epsilon": self.epsilon, "delta": self.delta, "spent": self.spent, "runs": len(self.runs)}
        return {**known, "entry": self.number, "hash": self.hash}


def events_of(run: dict[str, Any]) -> list[Event]:
    """Of one run in a ledger."""
    return [Event.from_dict(event) for event in run["events"]]


def rounded_down(value: float, digits: int = 4) -> float:
    """To so many significant digits, never more than it was."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return round(math.floor(value / unit) * unit, 12)
