"""What is left out of a log before training: a matter of each user's own rows. Users stay, if need be with nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dpformer.data.row_filter import RowFilter
from dpformer.data.time_window import Window
from dpformer.errors import DpformerError


@dataclass(frozen=True)
class Filters:
    """Which interactions count.

    Attributes:
        min_rating: leave out interactions rated lower.
        min_user_actions: leave out the interactions of users with fewer; the users stay, with nothing.
        where: keep the rows for which a condition on their own columns is true (`RowFilter`).
        since: keep interactions from this time on: a date, or a number in the unit of the log's times.
        until: keep interactions before this time.
    """

    min_rating: float | None = None
    min_user_actions: int = 0
    where: str | None = None
    since: str | None = None
    until: str | None = None

    def __post_init__(self) -> None:
        _ = self.row_filter, self.window  # refuses what cannot be understood

    @cached_property
    def row_filter(self) -> RowFilter | None:
        """The condition, checked; None if there is none."""
        return RowFilter.parse(self.where) if self.where else None

    @cached_property
    def window(self) -> Window | None:
        """None if it is open at both ends."""
        return Window.parse(self.since, self.until)

    def refuse_rows(self, what: str) -> None:
        """Refuses filters of rows where they are not applied."""
        given = [name for name in ("where", "since", "until") if getattr(self, name)]
        if given:
            raise DpformerError(f"--{given[0]} {what}")
