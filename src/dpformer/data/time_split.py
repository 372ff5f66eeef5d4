"""A split by time: one moment for all users separates training from testing.

Leave-last-out trains on actions of some users that happened after those on which others are tested, so it may flatter;
a split by time measures what a model trained at the cut would have achieved afterwards. The test item of a user is the
first one after the cut, and everything before it is the history. Users without a history there are cold, and tested
separately.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dpformer.data.dataset import Dataset

COLD = "cold"


@dataclass(frozen=True, eq=False)
class TimeSplitDataset(Dataset):
    """Sequences in which the first `cuts[u]` items of user u are before the cut."""

    cuts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # (users,) int64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuts.shape != (self.num_users,) or (self.cuts < 0).any() or (self.cuts > self.lengths).any():
            raise ValueError("a cut lies outside its user's sequence")
        if self.validation:
            raise ValueError("a split by time holds no validation items")

    @cached_property
    def train_stops(self) -> np.ndarray:
        return np.asarray(self.offsets[:-1] + self.cuts)

    def held_out(self, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
        """Users with an item after the cut, and the first such item of each.

        Args:
            split: "test": users with a history before the cut; "cold": the others.
        """
        later = self.lengths > self.cuts
        users = np.flatnonzero(later & ((self.cuts == 0) if split == COLD else (self.cuts > 0)))
        return users, self.items[self.held_out_rows(users, split)].astype(np.int64)

    def held_out_rows(self, users: np.ndarray, split: str = "test") -> np.ndarray:
        if split not in ("test", COLD):
            raise ValueError(f"split must be 'test' or 'cold' where data is split by time, not {split!r}")
        if (self.lengths[users] <= self.cuts[users]).any():
            raise ValueError("a user without an item after the cut has no held-out item")
        return np.asarray(self.offsets[:-1][users] + self.cuts[users])

    def leave_last_out(self) -> Dataset:
        """The same sequences with the last item of each user held out."""
        return Dataset(
            self.items,
            self.offsets,
            self.user_ids,
            self.vocabulary,
            self.max_length,
            weights=self.weights,
            sessions=self.sessions,
        )

    @cached_property
    def hash(self) -> str:
        """The hash of the sequences and of the cuts. Computed without noise: do not release it."""
        digest = hashlib.sha256(f"dpformer split by time 1\n{super().hash}\n".encode())
        digest.update(np.ascontiguousarray(self.cuts, dtype="<i8").data)
        return digest.hexdigest()
