"""A batch of users as the models see it: right-padded items, the items to predict, and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B users, one row each. A row is one user: losses, gradients and clipping are per row.

    Rows are padded on the *right* with item 0 and target −1. Attention is causal, so no real position ever looks at a
    pad, and a pad has no loss: pads get no gradient, and no row of the embedding is set aside for them.
    """

    items: Tensor  # (B, L) int64, what goes in
    targets: Tensor  # (B, L) int64, the item to predict at each position; −1: nothing to predict
    lengths: Tensor  # (B,) int64, real positions in each row

    @classmethod
    def from_histories(cls, histories: Sequence[ArrayLike], max_length: int, length: int = 1) -> Batch:
        """For training: each item but the last goes in, each but the first is predicted from those before it.

        The last `max_length` transitions are kept. A user with fewer than two items is a row without loss. Rows have
        at least `length` positions.
        """
        inputs = [np.asarray(h, dtype=np.int64)[-max_length - 1 :] for h in _checked(histories, max_length)]
        items, lengths = _pad([h[:-1] for h in inputs], 0, length)
        targets, _ = _pad([h[1:] for h in inputs], -1, length)
        return cls(items, targets, lengths)

    @classmethod
    def for_scores(cls, histories: Sequence[ArrayLike], max_length: int) -> Batch:
        """For prediction: the last `max_length` items go in, and what comes after the last one is asked for."""
        inputs = [np.asarray(h, dtype=np.int64)[-max_length:] for h in _checked(histories, max_length)]
        items, lengths = _pad(inputs, 0)
        return cls(items, torch.full_like(items, -1), lengths)

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.items.to(device), self.targets.to(device), self.lengths.to(device))

    def __len__(self) -> int:
        return len(self.items)


def _checked(histories: Sequence[ArrayLike], max_length: int) -> Sequence[ArrayLike]:
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be 1 or more")
    return histories


def _pad(rows: list[np.ndarray], fill: int, least: int = 1) -> tuple[Tensor, Tensor]:
    """(B, L) with L the longest row (at least 1, so that an empty batch has a shape), and the lengths (B,)."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    padded = np.full((len(rows), max(least, lengths.max(initial=0))), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded), torch.from_numpy(lengths)
