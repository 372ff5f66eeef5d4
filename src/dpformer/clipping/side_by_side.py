"""Gradients that were written out already (biases, normalisation, scales), side by side: one norm, one sum for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dpformer.clipping.norms import ParameterUses
from dpformer.clipping.rounding import squared_lengths
from dpformer.clipping.uses import Dense

LARGE = 1 << 14  # numbers of one user: who else is in the batch decides nothing


@dataclass
class SideBySide:
    """The gradients of some parameters, each with one dense use, in one matrix."""

    groups: list[ParameterUses]
    matrix: Tensor  # (B, numbers of all)

    @staticmethod
    def of(groups: Sequence[ParameterUses]) -> list[SideBySide]:
        """All of one precision together; large ones are not copied."""
        kinds: dict[object, list[ParameterUses]] = {}
        for group in groups:
            gradient, small = group.dense_gradient, group.parameter.numel() < LARGE
            kinds.setdefault((gradient.dtype, gradient.device) if small else id(group), []).append(group)
        return [_joined(some) for some in kinds.values()]

    def squares(self) -> Tensor:
        """(2, B) of all these parameters together: as computed, and at most."""
        return torch.stack(squared_lengths(self.matrix))

    def keep(self, users: Tensor) -> None:
        """Forgets every user that is not kept."""
        self.matrix = self.matrix.masked_fill(~users[:, None], 0)

    def sums(self, c: Tensor) -> Iterator[tuple[ParameterUses, Tensor]]:
        """Σ_b c_b g_b of each parameter."""
        total = c.to(self.matrix.dtype) @ self.matrix
        sizes = [prod(group.parameter.shape) for group in self.groups]
        for group, part in zip(self.groups, total.split(sizes), strict=True):
            yield group, part.view(group.parameter.shape)


def _joined(groups: list[ParameterUses]) -> SideBySide:
    gradients = [group.dense_gradient for group in groups]
    users = len(gradients[0])
    if len(groups) == 1:
        return SideBySide(groups, gradients[0].reshape(users, -1))
    matrix = torch.cat([g.reshape(users, -1) for g in gradients], 1)
    at = 0
    for group, gradient in zip(groups, gradients, strict=True):  # a part of the matrix, instead of a copy
        end = at + prod(gradient.shape[1:])
        group.sources = [Dense(matrix[:, at:end].reshape(gradient.shape))]
        at = end
    return SideBySide(groups, matrix)
