"""Interactions in memory: user, item and time as arrays, from a data frame (`sources/frames.py`) or built by hand.

Ids may be of any type; internally they are text (`7` and `"7"` are the same id) and arrays hold their codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpformer.data.filters import Filters
from dpformer.data.histories import Histories, Times
from dpformer.errors import DpformerError

SMALL = 2**53


@dataclass(frozen=True)
class Interactions:
    """A log: row r says that user `user_ids[users[r]]` interacted with item `item_ids[items[r]]` at `timestamps[r]`.

    Without timestamps, rows are in order of time.
    """

    users: np.ndarray  # (rows,) int32
    items: np.ndarray  # (rows,) int32
    user_ids: Sequence[str]
    item_ids: Sequence[str]
    timestamps: np.ndarray | None = None  # (rows,) int64 or float64, finite
    ratings: np.ndarray | None = None  # (rows,) float64
    format: str = "arrays"

    def __len__(self) -> int:
        return len(self.users)

    def keep(self, rows: np.ndarray) -> "Interactions":
        """The rows of a boolean mask; codes keep their meaning."""
        if rows.all():
            return self
        return replace(
            self,
            users=self.users[rows],
            items=self.items[rows],
            timestamps=None if self.timestamps is None else self.timestamps[rows],
            ratings=None if self.ratings is None else self.ratings[rows],
        )

    def histories(self, filters: Filters | None = None) -> Histories:
        """One sequence per user; rows with equal times keep their order (almost half of ML-1M's rows tie)."""
        read = {"users": len(self.user_ids), "items": len(self.item_ids), "interactions": len(self)}
        log, filters = self, filters or Filters()
        filters.refuse_rows("applies to files and to frames for training; filter these rows beforehand")
        if filters.min_rating is not None:
            if log.ratings is None:
                raise DpformerError("min_rating is given, but the data has no ratings")
            log = log.keep(log.ratings >= filters.min_rating)
        log = log.keep(np.bincount(log.users, minlength=1)[log.users] >= filters.min_user_actions)
        if not len(log):
            raise DpformerError(f"the filters leave none of the {len(self):,} interactions: loosen them")
        timed = log.timestamps is not None
        keys = (log.users,) if log.timestamps is None else (log.timestamps, log.users)
        order = np.lexsort(keys)  # stable
        lengths = np.bincount(log.users, minlength=len(self.user_ids))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        codes, times = log.items[order].astype(np.int32), Times()
        if log.timestamps is not None:
            times.add(codes, log.timestamps[order], np.zeros(len(codes)), offsets)
        facts = {"format": self.format, "read": read, "skipped": {}, **times.facts("timestamp" if timed else None)}
        return Histories(self.user_ids, log.item_ids, codes, offsets, facts)


class Codes:
    """Numbers ids in order of appearance: `codes[id]` is the code, `names[code]` the id as text.

    The dict holds only text and small integers: True equals 1 in a dict, and one user's True must not become, or
    create, another user's 1; and integers beyond 2⁶¹ can be chosen such that a dict of them takes quadratic time.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._code_of_name: dict[str, int] = {}
        self._known: dict[str | int, int] = {}

    def __getitem__(self, raw: Any) -> int:
        if type(raw) is not str and not (type(raw) is int and -SMALL < raw < SMALL):
            return self._number(id_text(raw))
        code = self._known.get(raw)
        if code is None:
            code = self._known[raw] = self._number(id_text(raw))
        return code

    def _number(self, name: str) -> int:
        code = self._code_of_name.setdefault(name, len(self.names))
        if code == len(self.names):
            self.names.append(name)
        return code


def exact_below(raw: Any) -> int:
    """The bound from which floats of this precision stand for several integers: 2⁵³, or 2²⁴ for single precision."""
    return 2 ** (1 + np.finfo(np.asarray(raw).dtype).nmant)


def id_text(raw: Any) -> str:
    """An id as text without surrounding spaces; ValueError if there is none."""
    if raw is None or raw != raw or isinstance(raw, list | dict):
        raise ValueError(f"{raw!r} is not an id")
    if isinstance(raw, float | np.floating) and float(raw).is_integer():
        if abs(float(raw)) >= exact_below(raw):
            raise ValueError(f"{raw!r} is a float that stands for several integers; give ids as text")
        raw = int(raw)  # a table with missing values stores integers as floats
    name = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else str(raw)
    name = name.strip()
    if not name:
        raise ValueError("an id is empty")
    if "\0" in name or "\n" in name or "\r" in name:
        raise ValueError(f"the id {name[:40]!r} contains a line break or a zero byte (an unclosed quote?)")
    return name
