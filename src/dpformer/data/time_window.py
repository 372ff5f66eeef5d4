"""`--since` and `--until`: interactions within a time window, from `since` onwards and before `until`.

A bound is a date (ISO; UTC unless it has a time zone) or a number. A date is compared with times that are dates, and
with numeric times, which are taken as seconds, milliseconds, microseconds or nanoseconds since 1970 by their size, each
by itself: below 10¹¹, 10¹⁴ and 10¹⁷ (as seconds, the first is the year 5138; as milliseconds, 1973). A number is
compared with numbers unchanged.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from decimal import Decimal

from dpformer.errors import DpformerError

NS = 10**9
_UNITS = ((10**11, NS), (10**14, 10**6), (10**17, 10**3))  # numbers below → nanoseconds in one unit; others are ns
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


@dataclass(frozen=True)
class Bound:
    """A moment: nanoseconds since 1970 of a date, or billionths of a number in any unit."""

    billionths: int
    is_date: bool

    @classmethod
    def parse(cls, text: str, name: str) -> Bound:
        """From a date or a number; `name` is the option to be named in errors."""
        text = text.strip()
        if _NUMBER.fullmatch(text):
            return cls(int(Decimal(text) * NS), is_date=False)
        try:
            found = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        except ValueError:
            raise DpformerError(
                f"--{name} is {text!r}; it must be a date (2024-01-31, 2024-01-31T10:00) or a number in the unit of "
                "the log's times"
            ) from None
        moment = found if found.tzinfo is not None else found.replace(tzinfo=datetime.timezone.utc)
        passed = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
        return cls(passed // datetime.timedelta(microseconds=1) * 1000, is_date=True)

    def sql(self, is_date: str) -> str:
        """SQL of a time (columns t, f and `is_date`) in the billionths of this bound."""
        whole = "CAST(t AS HUGEINT)"
        as_it_is = f"({whole} * {NS} + f)"
        if not self.is_date:
            return as_it_is
        scaled = " ".join(f"WHEN abs(t) < {below} THEN {whole} * {ns} + f * {ns} // {NS}" for below, ns in _UNITS)
        return f"CASE WHEN {is_date} THEN {as_it_is} {scaled} ELSE {whole} END"


_GAP = re.compile(r"(\d{1,9}) ?(s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def parse_gap(text: str) -> int:
    """A duration such as 30min, in nanoseconds."""
    found = _GAP.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise DpformerError(f"session_gap is {text!r}; it must be a duration: 90s, 30min, 2h or 1d")
    return int(found[1]) * _SECONDS[found[2]] * NS


def pause(gap: int, is_date: str, by_user: str) -> str:
    """SQL of 1 for a row that comes more than `gap` nanoseconds after the previous one of its user, otherwise 0.

    Args:
        gap: see `parse_gap`.
        is_date: as in `Bound.sql`; numeric times are scaled by their size, too.
        by_user: a window over the rows of a user, in order.
    """
    time = Bound(0, is_date=True).sql(is_date)
    return f"CASE WHEN {time} - lag({time}) OVER ({by_user}) > {gap} THEN 1 ELSE 0 END"


@dataclass(frozen=True)
class Window:
    """From `since` onwards, and before `until`; None: unbounded."""

    since: Bound | None = None
    until: Bound | None = None

    @classmethod
    def parse(cls, since: str | None, until: str | None) -> Window | None:
        """None if neither is given."""
        first, last = (Bound.parse(text, name) if text else None for text, name in ((since, "since"), (until, "until")))
        if first and last and first.is_date != last.is_date:
            raise DpformerError(f"since is {since!r} and until is {until!r}: give two dates or two numbers")
        if first and last and first.billionths >= last.billionths:
            raise DpformerError(f"since is {since!r}, which is not before until, {until!r}: the window is empty")
        return cls(first, last) if first or last else None

    @property
    def is_date(self) -> bool:
        return any(bound is not None and bound.is_date for bound in (self.since, self.until))

    def sql(self, is_date: str) -> str:
        """SQL of whether a time (columns t and f) is in the window; `is_date` is SQL of whether it is a date."""
        tests = []
        if self.since is not None:
            tests.append(f"{self.since.sql(is_date)} >= {self.since.billionths}")
        if self.until is not None:
            tests.append(f"{self.until.sql(is_date)} < {self.until.billionths}")
        return " AND ".join(tests)
