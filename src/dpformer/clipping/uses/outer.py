"""Outer products: what linear layers, matrix products and convolutions contribute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpformer.clipping.products import products


@dataclass
class Outer:
    """g_b = Σ_t left_bt ⊗ right_bt, reshaped to the parameter."""

    left: Tensor  # (B, T, Q)
    right: Tensor  # (B, T, P)
    shape: tuple[int, ...]  # Q·P numbers

    def part(self, a: int, b: int) -> Outer:
        if a == 0 and b == self.left.shape[0]:
            return self
        return Outer(self.left[a:b], self.right[a:b], self.shape)

    def pick(self, users: Tensor) -> Outer:
        return Outer(self.left[users], self.right[users], self.shape)

    def dense(self) -> Tensor:
        return self.squared_dense()[0]

    def squared_dense(self) -> tuple[Tensor, Tensor | None]:
        """And the squares of the users' norms, if they came with it."""
        written, squares = products(self.left, self.right)
        return written.reshape(-1, *self.shape), squares

    def add_to(self, out: Tensor) -> None:
        out.view(len(out), self.left.shape[2], -1).baddbmm_(self.left.mT, self.right)

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        left, right = self.left.flatten(0, 1).to(out.dtype), self.right.flatten(0, 1).to(out.dtype)
        scale = c.to(out.dtype).repeat_interleave(self.left.shape[1])[:, None]
        if left.shape[1] < right.shape[1]:
            left = left * scale
        else:
            right = right * scale
        out.view(left.shape[1], right.shape[1]).addmm_(left.mT, right)

    def keep(self, users: Tensor) -> None:
        """Forgets every user that is not kept: 0·NaN is NaN, so a factor of zero would not do."""
        self.left = self.left.masked_fill(~users[:, None, None], 0)
        self.right = self.right.masked_fill(~users[:, None, None], 0)

    @staticmethod
    def join(uses: Sequence[Outer]) -> Outer:
        if len(uses) == 1:
            return uses[0]
        return Outer(torch.cat([u.left for u in uses], 1), torch.cat([u.right for u in uses], 1), uses[0].shape)
