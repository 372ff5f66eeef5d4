"""Prepared data on disk that several processes see: each reads the histories of the users it works on, and no others.

The arrays are memory-mapped, so that what is read is what is asked for, and what is held is what the operating system
has room for. What a process needs to open them fits a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpformer.data.cache import load
from dpformer.data.dataset import Dataset
from dpformer.data.vocabulary import Vocabulary
from dpformer.errors import DpformerError


@dataclass(frozen=True)
class Store:
    """Where prepared data is, which it must be, and what of it is trained on."""

    folder: Path
    hash: str
    max_length: int | None
    numbers: np.ndarray | None  # (items of the data,) int32: their numbers in the model, -1 for none; None: the same

    @classmethod
    def of(cls, dataset: Dataset, vocabulary: Vocabulary) -> Store | None:
        """What is trained on over a released vocabulary (`restrict_to_vocabulary`); None if the data is not on disk."""
        if dataset.folder is None:
            return None
        same = list(vocabulary.ids) == list(dataset.vocabulary.ids)
        numbers = None if same else vocabulary.match(list(dataset.vocabulary.ids)).astype(np.int32)
        return cls(dataset.folder, dataset.hash, dataset.max_length, numbers)

    def open(self) -> StoredHistories:
        """DpformerError where it is not seen, not whole, or other data."""
        dataset = load(self.folder).with_max_length(self.max_length)
        if dataset.hash != self.hash:
            raise DpformerError(f"{self.folder} holds other data than process 0 has")
        return StoredHistories(dataset, self.numbers)


@dataclass(frozen=True)
class StoredHistories:
    """What users train on, read one at a time."""

    dataset: Dataset
    numbers: np.ndarray | None

    def train(self, user: int) -> np.ndarray:
        """The items a user trains on, as `restrict_to_vocabulary(…).train(user)` has them."""
        if self.numbers is None:
            return self.dataset.train(user)
        whole = self.dataset.items[self.dataset.offsets[user] : self.dataset.train_stops[user]]
        items = self.numbers[whole]
        items = items[items >= 0]
        return items if self.dataset.max_length is None else items[-self.dataset.max_length :]
