"""The budget of a data set over many runs: what is spent, what still fits, and each run's share of a plan.

Everything here is composition of events by the accountant. A plan of R runs limits each run to its share: run k is
refused if the earlier spending together with R − k + 1 runs like it (itself and all that follow) would exceed ε. So a
run that takes less leaves more to later runs, and no mixture of kinds can exceed the budget. For R Gaussian releases
the share is about ε/√R, where naive division gives ε/R.
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

MOST_RUNS = 10_000  # upper limit for the number of runs that still fit
CLOSE = 1e-3  # relative tolerance of a share
NO_PLAN = "the ledger has no plan to take a share of: give --epsilon, or create a plan with dpformer ledger plan"


@dataclass(frozen=True)
class Budget:
    """The contents of a ledger file."""

    epsilon: float
    delta: float
    runs: tuple[dict[str, Any], ...] = ()
    plan: int | None = None  # number of planned runs; None: no plan
    planned_after: int = 0  # number of runs before the plan was made
    number: int = 0  # number of the last entry
    hash: str = ""

    @property
    def spent(self) -> float:
        """ε of all runs together, at the ledger's δ."""
        return self.spent_with(())

    def spent_with(self, events: Sequence[Event], mean_runs: float | None = None, times: int = 1) -> float:
        """The same with `times` more runs of these events; with `mean_runs`, each is a search."""
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
        """The number of planned runs that remain; None without a plan."""
        return None if self.plan is None else max(0, self.plan - (len(self.runs) - self.planned_after))

    def alone(self, run: dict[str, Any]) -> float:
        """ε of one of the runs on its own, at the ledger's δ."""
        return Budget(self.epsilon, self.delta, (run,)).spent

    def fits(self, run: dict[str, Any]) -> int:
        """The number of further runs like this one that fit into the budget."""
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
        """The largest ε for which this run and all remaining runs like it stay within the budget.

        Args:
            planned: maps an ε to the events of a run with that ε on its own.
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
                raise DpformerError(f"the budget of ε = {plain(self.epsilon)} has nothing left for another run")
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
        """Why another run would break the plan; empty if it would not."""
        if self.left is None:
            return ""
        if not self.left:
            return f"{self._all_taken()}: create a new ledger with its own budget for a further period, or stop here"
        total = self.spent_with(events, mean_runs, self.left)
        if total <= self.epsilon:
            return ""
        return (
            f"this run exceeds its share: {self.left} of {self.plan} runs are left, and if each cost as much the total "
            f"would be ε = {plain(total)} of {plain(self.epsilon)}; omit --epsilon to use this run's share"
        )

    def facts(self) -> dict[str, Any]:
        """The facts for a statement, with number and hash of the last entry, which is this run's."""
        known = {"epsilon": self.epsilon, "delta": self.delta, "spent": self.spent, "runs": len(self.runs)}
        return {**known, "entry": self.number, "hash": self.hash}


def events_of(run: dict[str, Any]) -> list[Event]:
    """The events of one run in a ledger."""
    return [Event.from_dict(event) for event in run["events"]]


def rounded_down(value: float, digits: int = 4) -> float:
    """The value rounded down to `digits` significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return round(math.floor(value / unit) * unit, 12)
