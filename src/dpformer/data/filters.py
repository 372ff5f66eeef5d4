"""Filters applied to a log before training, depending on each user's own rows only. Users stay, even without rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dpformer.data.row_filter import RowFilter
from dpformer.data.time_window import Window
from dpformer.errors import DpformerError


@dataclass(frozen=True)
class Filters:
    """Which interactions are used.

    Attributes:
        min_rating: drop interactions with a lower rating.
        min_user_actions: drop the interactions of users with fewer; the users stay, with an empty history.
        where: keep the rows for which a condition on their own columns is true (`RowFilter`).
        since: keep interactions from this time onwards: a date, or a number in the unit of the log's times.
        until: keep interactions before this time.
    """

    min_rating: float | None = None
    min_user_actions: int = 0
    where: str | None = None
    since: str | None = None
    until: str | None = None

    def __post_init__(self) -> None:
        _ = self.row_filter, self.window  # refuses invalid conditions

    @cached_property
    def row_filter(self) -> RowFilter | None:
        """The parsed condition; None if there is none."""
        return RowFilter.parse(self.where) if self.where else None

    @cached_property
    def window(self) -> Window | None:
        """None if it is open at both ends."""
        return Window.parse(self.since, self.until)

    def refuse_rows(self, what: str) -> None:
        """Refuse row filters where they cannot be applied."""
        given = [name for name in ("where", "since", "until") if getattr(self, name)]
        if given:
            raise DpformerError(f"--{given[0]} {what}")
