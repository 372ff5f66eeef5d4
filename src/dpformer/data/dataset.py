"""A prepared data set: one sequence of items per user, packed into two arrays, with the last item held out.

Everything is `items[offsets[u]:offsets[u + 1]]`, user u's items in order of time. The split is leave-last-out: the
last item of a user is the test item and, with `validation`, the one before it the validation item. Users with fewer
than three items are too short for testing and used for training only (as in SASRec). Held-out items are never used
for training.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.unordered_hash import unordered_hash
from dpformer.data.vocabulary import Vocabulary
from dpformer.engines.digests import digest_sums

MIN_TO_TEST = 3


@dataclass(frozen=True, eq=False)
class Dataset:
    """Item sequences of all users; arrays may be memory-mapped and are never modified.

    Users are 0..num_users-1 and items 0..num_items-1; `user_ids[u]` and `vocabulary.ids[i]` are the ids of the log.
    `max_length` limits training to the last items of a user; None: whole histories. `description` holds the facts for
    the privacy statement; they come from the data and no guarantee covers them. `folder` is where the data is on disk
    (`cache.load`), for other processes; None: in memory only. `weights` and `sessions` are parallel to `items`: how
    much an interaction counts, and the number of its session (`Filters`); None: 1, and one session.
    """

    items: np.ndarray  # (interactions,) int32
    offsets: np.ndarray  # (users + 1,) int64
    user_ids: Sequence[str]
    vocabulary: Vocabulary
    max_length: int | None = 200
    validation: bool = False
    description: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    weights: np.ndarray | None = None  # (interactions,) uint8, from 1
    sessions: np.ndarray | None = None  # (interactions,) int32

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, not {self.max_length}")
        if len(self.user_ids) != self.num_users:
            raise ValueError(f"{len(self.user_ids)} user ids for {self.num_users} users")
        ends = (int(self.offsets[0]), int(self.offsets[-1]))
        if ends != (0, len(self.items)) or (np.diff(self.offsets) < 0).any():
            raise ValueError("offsets do not cut the items into users")
        if len(self.items) and not (self.items.min() >= 0 and self.items.max() < self.num_items):
            raise ValueError(f"an item lies outside 0..{self.num_items - 1}")
        for marks in (self.weights, self.sessions):
            if marks is not None and marks.shape != self.items.shape:
                raise ValueError(f"{len(marks)} weights or sessions for {len(self.items)} items")

    @classmethod
    def from_histories(
        cls, histories: Iterable[Sequence[int]], num_items: int, *, max_length: int = 200, validation: bool = False
    ) -> "Dataset":
        """A data set from one sequence of item numbers per user, in order of time."""
        arrays = [np.asarray(history, dtype=np.int64) for history in histories]
        offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int64)
        items = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        if len(items) and not (items.min() >= 0 and items.max() < num_items):
            raise ValueError(f"an item lies outside 0..{num_items - 1}")
        names = [str(number) for number in range(max(num_items, len(arrays)))]
        vocabulary = Vocabulary(names[:num_items])
        return cls(items.astype(np.int32), offsets, names[: len(arrays)], vocabulary, max_length, validation)

    # Sizes.

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_items(self) -> int:
        return len(self.vocabulary)

    @property
    def num_interactions(self) -> int:
        return len(self.items)

    @property
    def titles(self) -> Sequence[str] | None:
        """Titles of items, if a catalogue provides them."""
        return self.vocabulary.titles

    @cached_property
    def lengths(self) -> np.ndarray:  # (users,) int64
        """Number of items of each user, including held-out ones."""
        return np.diff(self.offsets)

    # Training: everything before the held-out items, limited to the last `max_length` items.

    @cached_property
    def train_stops(self) -> np.ndarray:  # (users,) int64
        """Where each user's training part ends in `items`."""
        held_out = np.where(self.lengths >= MIN_TO_TEST, 1 + self.validation, 0)
        return self.offsets[1:] - held_out

    @cached_property
    def train_starts(self) -> np.ndarray:  # (users,) int64
        """Where the last `max_length` items of each user's training part start in `items`."""
        whole = self.offsets[:-1]
        return whole if self.max_length is None else np.maximum(whole, self.train_stops - self.max_length)

    @cached_property
    def train_lengths(self) -> np.ndarray:  # (users,) int64
        """Number of training items of each user, at most `max_length`."""
        return self.train_stops - self.train_starts

    def train(self, user: int) -> np.ndarray:
        """The training items of a user."""
        return np.asarray(self.items[self.train_starts[user] : self.train_stops[user]])

    def histories(self, users: Iterable[int]) -> list[np.ndarray]:
        """The training items of several users."""
        return [self.train(user) for user in users]

    def batch(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The training items of several users as one (B, longest) int64 array, padded with 0, and lengths (B,)."""
        return self._padded(self.train_starts[users], self.train_stops[users])

    def packed_train(self) -> tuple[np.ndarray, np.ndarray]:
        """The training items of all users: items (n,) int32 and offsets (users + 1,), at most `max_length` per user."""
        offsets = np.concatenate([[0], np.cumsum(self.train_lengths)])
        return self.items[_ranges(self.train_starts, self.train_lengths)], offsets

    def item_counts(self) -> np.ndarray:  # (items,) int64
        """Frequency of each item before the held-out ones, in whole histories. Not private."""
        starts = self.offsets[:-1]
        rows = _ranges(starts, self.train_stops - starts)
        return np.bincount(self.items[rows], minlength=self.num_items)

    # Evaluation: the held-out item, and every earlier item of the user.

    def held_out(self, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
        """Users that can be tested and the item to predict for each, (n,) int64 both."""
        users = np.flatnonzero(self.lengths >= MIN_TO_TEST)
        return users, self.items[self.held_out_rows(users, split)].astype(np.int64)

    def held_out_rows(self, users: np.ndarray, split: str = "test") -> np.ndarray:
        """Position in `items` of the held-out item of each user; the items before it are the user's history."""
        if split not in ("test", "validation"):
            raise ValueError(f"split must be 'test' or 'validation', not {split!r}")
        if split == "validation" and not self.validation:
            raise ValueError("this data set holds no validation items; prepare it with validation=True")
        if (self.lengths[users] < MIN_TO_TEST).any():
            raise ValueError(f"a user with fewer than {MIN_TO_TEST} items has no held-out item")
        return self.offsets[1:][users] - (1 if split == "test" else 2)

    def held_out_histories(self, users: np.ndarray, split: str = "test") -> list[np.ndarray]:
        """Every item before the held-out one for each user; the history for testing includes the validation item."""
        stops = self.held_out_rows(users, split)
        return [self.items[start:stop] for start, stop in zip(self.offsets[users], stops, strict=True)]

    def packed_held_out(self, users: np.ndarray, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
        """The same in one array: items (n,) int64 and offsets (B + 1,)."""
        lengths = self.held_out_rows(users, split) - self.offsets[users]
        items = self.items[_ranges(self.offsets[users], lengths)].astype(np.int64)
        return items, np.concatenate([[0], np.cumsum(lengths)])

    @property
    def test_users(self) -> np.ndarray:
        """Users with a test item."""
        return self.held_out()[0]

    @property
    def test_items(self) -> np.ndarray:
        """The test item of each of `test_users`."""
        return self.held_out()[1]

    def test_history(self, user: int) -> np.ndarray:
        """Every item of a user before the test item."""
        return self.held_out_histories(np.array([user]))[0]

    def with_max_length(self, max_length: int | None) -> "Dataset":
        """The same data with training limited to `max_length` items per user."""
        return replace(self, max_length=max_length, description={**self.description, "max_length": max_length})

    def with_attributes(self, catalog: Vocabulary) -> "Dataset":
        """The same data with the public attributes of a catalogue."""
        if catalog.attributes is None:
            return self
        attributes = catalog.attributes.of_rows(catalog.match(self.vocabulary.ids))
        facts = {**self.description.get("vocabulary", {}), "attributes": len(attributes)}
        description = {**self.description, "vocabulary": facts}
        return replace(self, vocabulary=replace(self.vocabulary, attributes=attributes), description=description)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of sequences, vocabulary and split. Computed from the data without noise: do not release it."""
        digest = hashlib.sha256(f"dpformer data 1\n{int(self.validation)} {self.num_users} {self.num_items}\n".encode())
        digest.update(np.ascontiguousarray(self.offsets, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.items, dtype="<i4").data)
        for kind, marks in (("weights", self.weights), ("sessions", self.sessions)):
            if marks is not None:
                digest.update(f"{kind}\n".encode() + np.ascontiguousarray(marks, dtype="<i4").tobytes())
        for name in self.vocabulary.ids:
            digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    @cached_property
    def unordered_hash(self) -> str:
        """The same for the same histories, whatever order users come in; private, too."""
        totals = digest_sums(self.items, self.offsets)
        return unordered_hash(totals, self.vocabulary, self.num_users, self.validation)

    def _padded(self, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths = stops - starts
        width = int(lengths.max(initial=0))
        valid = np.arange(width) < lengths[:, None]  # (B, L)
        batch = np.zeros(valid.shape, dtype=np.int64)
        batch[valid] = self.items[_ranges(starts, lengths)]
        return batch, lengths


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start_0, start_0 + 1, …, start_1, …: concatenated ranges without a loop."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
