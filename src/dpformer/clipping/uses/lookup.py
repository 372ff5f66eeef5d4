"""Rows of a table read by index: what embeddings contribute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpformer.kernels import native


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

    @property
    def is_plain(self) -> bool:
        """Whether compiled code can read it: not a question of how far the reads are padded."""
        return native.supports(self.grad)

    def squares(self) -> Tensor:
        """(B,) ‖g_b‖² by compiled code: rows that read the same entry are added up first."""
        assert native.kernels is not None
        squares = torch.empty(len(self.ids), dtype=torch.float64)
        native.kernels.square_lookups(*self._arrays(), squares.numpy())
        return squares

    def add_compiled(self, out: Tensor, squares: Tensor) -> None:
        """`add_to`; the squares of what is there become those of what is there then."""
        assert native.kernels is not None
        native.kernels.add_lookups(*self._arrays(), out.numpy(), squares.numpy())

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self.ids.contiguous().numpy(), native.rows_of(self.grad)

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
