"""`--event-weights purchase=3,view=1`: how much an interaction counts, by the kind of event in its row.

Weights are public constants, and that of a row is a function of that row alone. They change how a user's contribution
is spread over items; its norm is bounded as before (docs/maths/counts.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpformer.engines.sums import MOST_WEIGHT as MOST
from dpformer.errors import DpformerError

EVENT = "event"  # the usual name of the column of events


@dataclass(frozen=True)
class EventWeights:
    """Event → weight."""

    weights: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> EventWeights:
        """From "purchase=3,view=1"; an event may contain any character but a comma."""
        found: dict[str, int] = {}
        for part in text.split(","):
            event, equals, number = (piece.strip() for piece in part.rpartition("="))
            if not (equals and event and number.isascii() and number.isdigit() and 1 <= int(number) <= MOST):
                raise DpformerError(
                    f"event_weights is {text!r}; it must be like purchase=3,view=1, with whole numbers from 1 to "
                    f"{MOST} (drop other events with --where)"
                )
            if event in found:
                raise DpformerError(f"event_weights is {text!r}, with two weights for {event!r}: omit one")
            found[event] = int(number)
        return cls(found)

    def sql(self, column: str) -> str:
        """SQL of the weight by SQL of the event; NULL if it has none."""
        from dpformer.engines.duckdb_connection import text

        cases = " ".join(f"WHEN {text(event)} THEN {weight}" for event, weight in self.weights.items())
        return f"CAST(CASE CAST({column} AS VARCHAR) {cases} END AS UTINYINT)"
