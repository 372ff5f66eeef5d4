"""The latest items of a history, their weights, and sums of rows of sparse matrices over them."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

LATEST, FORGETTING = 20, 0.75  # number of items used, each weighing a quarter less than the next one


def latest_items(histories: Sequence[ArrayLike], num_items: int) -> np.ndarray:
    """(B, LATEST) int64: the last items of each history, latest first, padded with -1."""
    latest = np.full((len(histories), LATEST), -1)
    for row, history in zip(latest, histories, strict=True):
        items = np.asarray(history, dtype=np.int64)[: -LATEST - 1 : -1]
        row[: len(items)] = items
        if len(items) and not 0 <= items.min() <= items.max() < num_items:
            wrong = items[(items < 0) | (items >= num_items)][0]
            raise ValueError(f"item {wrong} is outside the vocabulary 0 … {num_items - 1}; map ids first")
    return latest


def recency(harmonic: bool) -> np.ndarray:  # (LATEST,) float64
    """The weights of the latest item, the one before it, …, before normalisation: 0.75^k, or 1/(1 + k) (`harmonic`)
    if attributes say much. docs/results/attributes.md has the gain.
    """
    back = np.arange(LATEST)
    return 1 / (1.0 + back) if harmonic else FORGETTING**back


def weights_of(back: Tensor, known: Tensor, harmonic: bool) -> Tensor:
    """α (B, L): `recency` where an item is known, 0 elsewhere; rows sum to 1, or to 0 without items."""
    weights = known / (1.0 + back.clamp(min=0)) if harmonic else known * FORGETTING ** back.clamp(min=0)
    return weights / weights.sum(1, keepdim=True).clamp(min=1e-9)


def row_of(offsets: Tensor) -> Tensor:
    """The row of each entry of a matrix whose row i is at offsets[i]:offsets[i + 1]."""
    lengths = np.diff(offsets.cpu().numpy())
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(offsets.device)


def add_rows(out: Tensor, items: Tensor, weights: Tensor, offsets: Tensor, targets: Tensor, values: Tensor) -> None:
    """out[r] += Σ_k weights[r, k]·matrix[items[r, k]], with the matrix sparse by rows; negative items are skipped.

    Args:
        out: (R, columns).
        items: (R, L) int64.
        weights: (R, L).
        offsets: (rows + 1,) int64, of the matrix's rows in `targets` and `values`.
        targets: (n,) int64 columns.
        values: (n,).
    """
    for column, weight in zip(items.T, weights.T, strict=True):
        row = torch.nonzero(column >= 0)[:, 0]
        start, stop = offsets[column[row]], offsets[column[row] + 1]
        lengths = stop - start
        place = torch.arange(int(lengths.sum()), device=items.device)
        place += torch.repeat_interleave(start - (lengths.cumsum(0) - lengths), lengths)
        row = torch.repeat_interleave(row, lengths)
        added = weight.to(out.dtype)[row] * values[place]
        out.view(-1).index_add_(0, row * out.shape[1] + targets[place], added)
