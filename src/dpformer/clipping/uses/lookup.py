"""Rows of a table read by index: what embeddings contribute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Lookup:
    """g_b = Σ_t onehot(id_bt) ⊗ grad_bt: rows of a table, read by index."""

    ids: Tensor  # (B, T) int64
    grad: Tensor  # (B, T, D)
    shape: tuple[int, ...]  # (M, …) with D numbers a row

    def part(self, a: int, b: int) -> Lookup:
        if a == 0 and b == self.ids.shape[0]:
            return self
        return Lookup(self.ids[a:b], self.grad[a:b], self.shape)

    def pick(self, users: Tensor) -> Lookup:
        return Lookup(self.ids[users], self.grad[users], self.shape)

    def dense(self) -> Tensor:
        out = self.grad.new_zeros(len(self.ids), *self.shape)
        self.add_to(out)
        return out

    def add_to(self, out: Tensor) -> None:
        offset = torch.arange(len(self.ids), device=self.ids.device)[:, None] * self.shape[0]
        rows = out.view(len(out) * self.shape[0], self.grad.shape[-1])
        rows.index_add_(0, (self.ids + offset).flatten(), self.grad.flatten(0, 1))

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        scaled = (self.grad * c[:, None, None]).flatten(0, 1).to(out.dtype)
        out.view(self.shape[0], self.grad.shape[-1]).index_add_(0, self.ids.flatten(), scaled)

    def keep(self, users: Tensor) -> None:
        self.grad = self.grad.masked_fill(~users[:, None, None], 0)

    @staticmethod
    def join(uses: Sequence[Lookup]) -> Lookup:
        if len(uses) == 1:
            return uses[0]
        return Lookup(torch.cat([u.ids for u in uses], 1), torch.cat([u.grad for u in uses], 1), uses[0].shape)
