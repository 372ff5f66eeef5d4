"""Canaries: synthetic users whose entire gradient is one coordinate, so that each can be observed separately.

Canary j owns one coordinate of one parameter. Parameters have all usual shapes: a table, like a shared embedding and
softmax; a vector, like a bias; kernels of convolutions; a scalar; and one that no loss uses. Table and vector are
used twice, and the loss is linear in the canary's coordinate, for the table

    loss_j = s/2 · (E[row_j] · e_col + (e_col Eᵀ)_row_j),     so ∂loss_j/∂E = s·e_(row_j, col_j), of norm s ≫ C,

half of the gradient from each use: norms that omit the cross term of tied uses are too small by √2, and the canary's
contribution is then √2 too large. Clipped, a canary adds C to its own coordinate and nothing else.
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

WIDTH = 64  # columns of the table, like an embedding's
SPARE = 16  # rows of the table without canaries: pure noise
LOUD = 1000.0  # s in units of C: clipping must reduce it to C
# Parameters besides the table, each with at most 64 entries, the first of which belong to canaries.
SMALL: dict[str, tuple[tuple[int, ...], int]] = {
    "scalar": ((), 0),
    "unused": ((16,), 0),
    "vector": ((64,), 32),
    "kernel_1d": ((4, 4, 4), 32),
    "kernel_2d": ((4, 4, 2, 2), 32),
}
IN_SMALL = sum(owned for _, owned in SMALL.values())


class CanaryModel(nn.Module):
    """The model trained on `count` canaries, initially zero."""

    max_length = 2  # a history is the two digits of a canary's number

    def __init__(self, count: int, clip_norm: float) -> None:
        super().__init__()
        self.scalar: nn.Parameter
        self.vector: nn.Parameter
        self.kernel_1d: nn.Parameter
        self.kernel_2d: nn.Parameter
        for name, (shape, _) in SMALL.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.table = nn.Parameter(torch.zeros(math.ceil(max(count - IN_SMALL, 1) / WIDTH) + SPARE, WIDTH))
        self.count, self.weight = count, LOUD * clip_norm

    def forward(self, batch: Batch) -> Tensor:
        """(B,) losses."""
        # The synthetic users of the engine's self-check are not canaries: their coordinate is arbitrary.
        canary = (batch.items[:, 0] * WIDTH + batch.targets[:, 0]) % self.count
        values = 0 * self.scalar * canary.to(self.table)  # used, but owned by no canary
        first = 0
        for name, (_, owned) in SMALL.items():
            if owned:
                place, here = canary - first, (canary >= first) & (canary < first + owned)
                values = values + here * getattr(self, f"_in_{name}")(place.clamp(0, owned - 1))
                first += owned
        return self.weight * (values + (canary >= first) * self._in_table((canary - first).clamp(min=0)))

    # Value at an index (B,) of a flattened parameter, by the functions that use such parameters.

    def _in_table(self, place: Tensor) -> Tensor:
        rows, columns = place // WIDTH, place % WIDTH
        picked = F.one_hot(columns, WIDTH).to(self.table)  # (B, d)
        looked_up = (F.embedding(rows, self.table) * picked).sum(1)
        multiplied = F.linear(picked, self.table).gather(1, rows[:, None])[:, 0]
        return (looked_up + multiplied) / 2

    def _in_vector(self, place: Tensor) -> Tensor:
        picked = F.one_hot(place, len(self.vector)).to(self.table)  # (B, 64)
        added = F.linear(0 * picked, torch.zeros(2 * [len(self.vector)]).to(picked), self.vector)
        return ((picked * self.vector).sum(1) + (picked * added).sum(1)) / 2

    def _in_kernel_1d(self, place: Tensor) -> Tensor:
        seen = F.one_hot(place % 16, 16).to(self.table).view(-1, 4, 4)
        return F.conv1d(seen, self.kernel_1d)[:, :, 0].gather(1, (place // 16)[:, None])[:, 0]

    def _in_kernel_2d(self, place: Tensor) -> Tensor:
        seen = F.one_hot(place % 16, 16).to(self.table).view(-1, 4, 2, 2)
        return F.conv2d(seen, self.kernel_2d)[:, :, 0, 0].gather(1, (place // 16)[:, None])[:, 0]

    # Positions of canaries in all parameters, concatenated.

    def slices(self) -> dict[str, slice]:
        """Each parameter's slice of all parameters, flattened and concatenated."""
        ends = np.cumsum([parameter.numel() for parameter in self.parameters()]).tolist()
        starts = [0, *ends[:-1]]
        return {name: slice(*ends) for (name, _), *ends in zip(self.named_parameters(), starts, ends, strict=True)}

    def coordinates(self) -> np.ndarray:
        """(count,) the index of each canary's coordinate."""
        slices = self.slices()
        owned = [np.arange(slices[name].start, slices[name].start + number) for name, (_, number) in SMALL.items()]
        table = np.arange(slices["table"].start, slices["table"].stop)
        return np.concatenate([*owned, table])[: self.count]


def canary_data(members: Sequence[int] | np.ndarray, count: int) -> Dataset:
    """The data set of the canaries that take part: user u is canary `members[u]`, out of `count`."""
    items = max(math.ceil(count / WIDTH), WIDTH)  # a history has two digits
    return Dataset.from_histories([divmod(int(j), WIDTH) for j in members], items, max_length=2)
