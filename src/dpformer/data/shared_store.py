"""Prepared data on disk that several processes share: each reads only the histories of the users it works on.

The arrays are memory-mapped, so only what is needed is read, and the operating system decides what stays in memory. The
information needed to open them fits into one message.
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
    """Where prepared data is, its hash, and its training part."""

    folder: Path
    hash: str
    max_length: int | None
    numbers: np.ndarray | None  # (items of the data,) int32: their numbers in the model, -1 if missing; None: identical

    @classmethod
    def of(cls, dataset: Dataset, vocabulary: Vocabulary) -> Store | None:
        """The training part over a released vocabulary (`restrict_to_vocabulary`); None if not on disk."""
        if dataset.folder is None:
            return None
        same = list(vocabulary.ids) == list(dataset.vocabulary.ids)
        numbers = None if same else vocabulary.match(list(dataset.vocabulary.ids)).astype(np.int32)
        return cls(dataset.folder, dataset.hash, dataset.max_length, numbers)

    def open(self) -> StoredHistories:
        """Open the data; DpformerError if it is missing, damaged, or other data."""
        dataset = load(self.folder).with_max_length(self.max_length)
        if dataset.hash != self.hash:
            raise DpformerError(f"{self.folder} holds other data than that of process 0")
        return StoredHistories(dataset, self.numbers)


@dataclass(frozen=True)
class StoredHistories:
    """Training histories, read one at a time."""

    dataset: Dataset
    numbers: np.ndarray | None

    def train(self, user: int) -> np.ndarray:
        """The training items of a user, as in `restrict_to_vocabulary(…).train(user)`."""
        if self.numbers is None:
            return self.dataset.train(user)
        whole = self.dataset.items[self.dataset.offsets[user] : self.dataset.train_stops[user]]
        items = self.numbers[whole]
        items = items[items >= 0]
        return items if self.dataset.max_length is None else items[-self.dataset.max_length :]
