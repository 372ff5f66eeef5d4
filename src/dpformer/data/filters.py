"""Filters and weights applied to a log before training: functions of each user's own rows. Users stay without rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dpformer.data.event_weights import EVENT, EventWeights
from dpformer.data.row_filter import RowFilter
from dpformer.data.time_window import Window, parse_gap
from dpformer.errors import DpformerError


@dataclass(frozen=True)
class Filters:
    """Which interactions are used, and how much they count.

    Attributes:
        min_rating: drop interactions with a lower rating.
        min_user_actions: drop the interactions of users with fewer; the users stay, with an empty history.
        where: keep the rows for which a condition on their own columns is true (`RowFilter`).
        since: keep interactions from this time onwards: a date, or a number in the unit of the log's times.
        until: keep interactions before this time.
        event_weights: how much an interaction counts, by its event (`EventWeights`).
        event_column: the column of events; by default `event`.
        session_gap: a pause that ends a session (`parse_gap`): an item is followed only by items of its session.
    """

    min_rating: float | None = None
    min_user_actions: int = 0
    where: str | None = None
    since: str | None = None
    until: str | None = None
    event_weights: str | None = None
    event_column: str | None = None
    session_gap: str | None = None

    def __post_init__(self) -> None:
        _ = self.row_filter, self.window, self.gap  # refuses invalid conditions

    @cached_property
    def weights(self) -> EventWeights | None:
        """The parsed weights; None if there are none."""
        return EventWeights.parse(self.event_weights) if self.event_weights else None

    @cached_property
    def gap(self) -> int | None:
        """The pause in nanoseconds; None if there is none."""
        return parse_gap(self.session_gap) if self.session_gap else None

    @cached_property
    def row_filter(self) -> RowFilter | None:
        """What is computed from each row: the condition, and the weight; None if there is neither."""
        condition = RowFilter.parse(self.where) if self.where else None
        if self.weights is None:
            return condition
        return (condition or RowFilter("true", ())).with_weight(self.event_column or EVENT, self.weights)

    @cached_property
    def window(self) -> Window | None:
        """None if it is open at both ends."""
        return Window.parse(self.since, self.until)

    def refuse_rows(self, what: str) -> None:
        """Refuse row filters where they cannot be applied."""
        given = [name for name in ("where", "since", "until", "event_weights", "session_gap") if getattr(self, name)]
        if given:
            raise DpformerError(f"--{given[0].replace('_', '-')} {what}")
