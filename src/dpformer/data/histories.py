"""Histories: a log as one sequence of item codes per user, in order of time, and facts about how it was read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.columns import Columns
from dpformer.data.filters import Filters
from dpformer.data.log import MARKS, Log, open_log
from dpformer.data.reading import Reading
from dpformer.errors import DpformerError


@dataclass(frozen=True)
class Histories:
    """User `user_ids[u]` interacted with items `item_ids[c]` for c in codes[offsets[u]:offsets[u + 1]], in this order.

    Users whose interactions were all filtered out are included, with empty histories.
    """

    user_ids: Sequence[str]
    item_ids: Sequence[str]
    codes: np.ndarray  # (interactions,) int32
    offsets: np.ndarray  # (users + 1,) int64
    facts: dict[str, Any] = field(default_factory=dict)  # format, read, order, time_range, …: not private
    cuts: np.ndarray | None = (
        None  # (users,) int64: number of each user's interactions before the cut of a split by time
    )
    weights: np.ndarray | None = None  # (interactions,) uint8: of `Filters.event_weights`
    sessions: np.ndarray | None = None  # (interactions,) int32: of `Filters.session_gap`

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def named(self) -> dict[str, list[str]]:
        """User id → item ids."""
        return {
            self.user_ids[user]: [
                self.item_ids[code] for code in self.codes[self.offsets[user] : self.offsets[user + 1]]
            ]
            for user in range(len(self))
        }


def read(
    path: str | Path,
    columns: Columns | None = None,
    reading: Reading | None = None,
    filters: Filters | None = None,
    split_at: str | None = None,
) -> Histories:
    """Read a log.

    Args:
        path: CSV, TSV, JSON lines, RecBole `.inter`, MovieLens `::`, plain lines, Parquet, a DuckDB or SQLite database;
            a folder or glob of such files; `-` for standard input; a URL of any of these, or of a database.
        columns: names of columns, if they are not the usual ones.
        reading: other reading options.
        filters: which interactions to use.
        split_at: the cut of a split by time, a date or a number.
    """
    with open_log(Path(path), columns, reading, filters, split_at) as log:
        offsets = log.offsets()
        if not offsets[-1]:
            raise DpformerError(f"the filters leave none of the {log.interactions:,} interactions: loosen them")
        codes, times = np.empty(offsets[-1], dtype=np.int32), Times()
        marks = {name: np.empty(offsets[-1], dtype=MARKS[name]) for name in log.marks}
        for users, part in log.parts(offsets):
            first, last = offsets[users.start], offsets[users.stop]
            codes[first:last] = part["i"]
            for name, values in marks.items():
                values[first:last] = part[name]
            if log.time_column is not None:
                times.add(part["i"], part["t"], part["f"], offsets[users.start : users.stop + 1] - first)
        if "sessions" in marks:
            marks["sessions"] = np.cumsum(marks["sessions"], dtype=np.int32)
        cuts = None if split_at is None else log.cuts(offsets)
        return Histories(log.user_ids, log.item_ids, codes, offsets, _facts(log, times), cuts, **marks)


def _facts(log: Log, times: "Times") -> dict[str, Any]:
    read = {"users": len(log.user_ids), "items": log.different_items, "interactions": log.interactions}
    snapshot = {} if log.snapshot is None else {"snapshot": log.snapshot}
    return {"format": log.format, **snapshot, "read": read, "skipped": log.skipped, **times.facts(log.time_column)}


class Times:
    """Statistics of the times of a log, computed from the rows of successive blocks of users."""

    def __init__(self) -> None:
        self.rows = self.tied = self.duplicates = 0
        self.first: float | None = None
        self.last: float | None = None

    def add(self, items: np.ndarray, t: np.ndarray, f: np.ndarray, offsets: np.ndarray) -> None:
        """Rows of whole users, in order of user and time."""
        if not len(t):
            return
        self.rows += len(t)
        ends = float(t.min()), float(t.max())
        self.first = ends[0] if self.first is None else min(self.first, ends[0])
        self.last = ends[1] if self.last is None else max(self.last, ends[1])
        same = np.zeros(len(t) + 1, dtype=bool)  # same[r]: row r has the user and time of row r - 1
        same[1:-1] = (t[1:] == t[:-1]) & (f[1:] == f[:-1])
        same[offsets] = False
        tied = same[1:] | same[:-1]
        self.tied += int(tied.sum())
        group = np.cumsum(~same[:-1])[tied]
        pairs = np.sort(group * (int(items.max()) + 1) + items[tied])
        self.duplicates += int((pairs[1:] == pairs[:-1]).sum())

    def facts(self, column: str | None) -> dict[str, Any]:
        """Facts for a description; `column` None: rows are in file order."""
        if column is None:
            return {"order": "file", "time_column": None, "time_range": None, "tied_share": None, "duplicates": None}
        return {
            "order": "timestamp",
            "time_column": column,
            "time_range": [self.first, self.last],
            "tied_share": round(self.tied / max(1, self.rows), 4),
            "duplicates": self.duplicates,
        }
