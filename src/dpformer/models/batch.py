"""A batch of users as the models see it: right-padded items, the items to predict, and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B users, one row each. A row is one user: losses, gradients and clipping are per row.

    Rows are padded on the *right* with item 0 and target −1. Attention is causal, so no real position attends to
    padding, and padding has no loss: it gets no gradient, and needs no row of the embedding.
    """

    items: Tensor  # (B, L) int64, input items
    targets: Tensor  # (B, L) int64, the item to predict at each position; −1: nothing to predict
    lengths: Tensor  # (B,) int64, real positions in each row

    @classmethod
    def from_histories(cls, histories: Sequence[ArrayLike], max_length: int) -> Batch:
        """For training: every item but the last is an input, every item but the first a target.

        The last `max_length` transitions are kept. A user with fewer than two items is a row without loss.
        """
        inputs = [np.asarray(h, dtype=np.int64)[-max_length - 1 :] for h in _checked(histories, max_length)]
        items, lengths = _pad([h[:-1] for h in inputs], 0)
        targets, _ = _pad([h[1:] for h in inputs], -1)
        return cls(items, targets, lengths)

    @classmethod
    def for_scores(cls, histories: Sequence[ArrayLike], max_length: int) -> Batch:
        """For prediction: the last `max_length` items are the input, and the item after the last one is predicted."""
        inputs = [np.asarray(h, dtype=np.int64)[-max_length:] for h in _checked(histories, max_length)]
        items, lengths = _pad(inputs, 0)
        return cls(items, torch.full_like(items, -1), lengths)

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.items.to(device), self.targets.to(device), self.lengths.to(device))

    def __len__(self) -> int:
        return len(self.items)

    def alike(self, max_length: int) -> Batch:
        """Add padding and rows without items, so that no row is computed differently because of others.

        The summation order of matrix products depends on their shape. Rows of one `padded` length keep that length and,
        in multiples of 32 rows, the same order; additional rows follow the real ones.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        length = int(padded(np.array([longest]), max_length)[0])
        wide = length - self.items.shape[1]
        few = -len(self) % (32 // math.gcd(length, 32))
        items, targets = (F.pad(t, (0, wide, 0, few), value=fill) for t, fill in ((self.items, 0), (self.targets, -1)))
        return Batch(items, targets, F.pad(self.lengths, (0, few)))


def padded(lengths: np.ndarray, max_length: int) -> np.ndarray:
    """Lengths rounded up to four significant bits, at most `max_length`: by at most an eighth.

    >>> padded(np.array([200, 129, 35, 17, 9, 0]), 200)
    array([200, 144,  36,  18,   9,   1])
    """
    lengths = np.maximum(lengths, 1)
    step = 2 ** np.maximum(0, np.log2(lengths).astype(np.int64) - 3)
    return np.minimum(-(-lengths // step) * step, max_length)


def _checked(histories: Sequence[ArrayLike], max_length: int) -> Sequence[ArrayLike]:
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be 1 or more")
    return histories


def _pad(rows: list[np.ndarray], fill: int) -> tuple[Tensor, Tensor]:
    """(B, L) with L the longest row (at least 1, so that an empty batch has a shape), and the lengths (B,)."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    padded = np.full((len(rows), max(1, lengths.max(initial=0))), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded), torch.from_numpy(lengths)
