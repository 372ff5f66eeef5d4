"""Canaries: made-up users whose whole gradient is one coordinate, so that each can be looked for on its own.

Canary j owns coordinate (row, column) of a table E that is used twice, as a shared embedding is: looked up by row, and
multiplied as a softmax weight is. Its loss is linear in its coordinate,

    loss_j = s/2 · (E[row_j] · e_col + (e_col Eᵀ)_row_j),     so ∂loss_j/∂E = s·e_(row_j, col_j), of norm s ≫ C,

half of the gradient from each use: norms that forget what two uses have in common (the tied cross term) are too small
by √2, and the canary is then released √2 too large. Clipped, a canary adds C to its own coordinate and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpformer.data import Dataset
from dpformer.models import Batch

WIDTH = 64  # columns of the table, as of an embedding
SPARE = 16  # rows of the table that no canary owns: noise and nothing else
LOUD = 1000.0  # s in units of C: clipping has to bring it down to C


class CanaryTable(nn.Module):
    """The model that canaries are trained into: a table of `count` coordinates and spare ones, zero at the start."""

    max_length = 2  # a row and a column

    def __init__(self, count: int, clip_norm: float) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(math.ceil(count / WIDTH) + SPARE, WIDTH))
        self.weight = LOUD * clip_norm / 2

    def forward(self, batch: Batch) -> Tensor:
        """(B,) losses. A canary's history is its row, then its column."""
        # The users on whom the engine proves itself are nobody's canaries: any place will do for them.
        rows, columns = batch.items[:, 0] % len(self.table), batch.targets[:, 0] % WIDTH
        picked = F.one_hot(columns, WIDTH).to(self.table)  # (B, d)
        looked_up = (F.embedding(rows, self.table) * picked).sum(1)
        multiplied = F.linear(picked, self.table).gather(1, rows[:, None])[:, 0]
        return self.weight * (looked_up + multiplied)


def canary_data(members: Sequence[int] | np.ndarray, count: int) -> Dataset:
    """The data set of those canaries that take part: user u is canary `members[u]`, out of `count`."""
    items = max(math.ceil(count / WIDTH), WIDTH)  # a history holds a row and a column
    return Dataset.from_histories([divmod(int(j), WIDTH) for j in members], items, max_length=2)
