"""The kinds of uses: gradients written out, rows of a table, outer products with equal or unequal numbers of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpformer.kernels import native
from dpformer.kernels.products import add_sums, can_weigh, products, write_ragged


@dataclass
class Dense:
    """g_b itself, for parameters so small that a copy for each user costs nothing."""

    grad: Tensor  # (B, *shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.grad.shape[1:])

    def part(self, a: int, b: int) -> Dense:
        return Dense(self.grad[a:b])

    def pick(self, users: Tensor) -> Dense:
        return Dense(self.grad[users])

    def dense(self) -> Tensor:
        return self.grad

    def add_to(self, out: Tensor) -> None:
        out += self.grad

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        grads = self.grad.reshape(len(c), -1)
        if can_weigh(grads, out):
            add_sums([(grads, out, True)], c)
        elif out.dtype == grads.dtype and out.is_contiguous():
            out.view(-1).addmv_(grads.T, c.to(grads.dtype))
        else:
            out += (c.to(grads.dtype) @ grads).reshape(self.shape)

    def keep(self, users: Tensor) -> None:
        self.grad = self.grad.masked_fill(~users.reshape(-1, *[1] * (self.grad.ndim - 1)), 0)


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


@dataclass
class Ragged:
    """An `Outer` whose users have unequal numbers of rows, packed user by user: no padding is read or written.

    Users that follow each other with equal numbers of rows are one batched product; sorted by length, they are few.
    """

    left: Tensor  # (N, Q)
    right: Tensor  # (N, P)
    counts: Sequence[int]  # rows of each user, N in all
    shape: tuple[int, ...]  # (Q, P)
    long: Tensor | None = (
        None  # (N,) what the rows of `left` are long at most, where that is known without reading them
    )

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """(a, b, first row, rows each) of every stretch of users with equal numbers of rows."""
        a = row = 0
        for count, group in itertools.groupby(self.counts):
            b = a + len(list(group))
            yield a, b, row, count
            row += (b - a) * count
            a = b

    def blocks(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(a, b, left (b−a, T, Q), right (b−a, T, P)) of every such stretch."""
        for a, b, row, each in self.runs():
            rows, size = slice(row, row + (b - a) * each), (b - a, each)
            left, right = self.left[rows], self.right[rows]
            yield a, b, left.view(*size, left.shape[1]), right.view(*size, right.shape[1])

    def part(self, a: int, b: int) -> Ragged:
        first, counts = sum(self.counts[:a]), self.counts[a:b]
        return self._some(slice(first, first + sum(counts)), counts)

    def pick(self, users: Tensor) -> Ragged:
        counts = torch.tensor(self.counts)
        rows = users.cpu().repeat_interleave(counts).to(self.left.device)
        return self._some(rows, counts[users.cpu()].tolist())

    def _some(self, rows: slice | Tensor, counts: Sequence[int]) -> Ragged:
        long = None if self.long is None else self.long[rows]
        return Ragged(self.left[rows], self.right[rows], counts, self.shape, long)

    def dense(self) -> Tensor:
        return self.squared_dense()[0]

    def squared_dense(self) -> tuple[Tensor, Tensor | None]:
        """And the squares of the users' norms, if they came with it."""
        out = self.left.new_empty(len(self.counts), self.left.shape[1], self.right.shape[1])
        squares = write_ragged(self.left, self.right, self.counts, out)
        if squares is None:
            for a, b, left, right in self.blocks():
                torch.bmm(left.mT, right, out=out[a:b])
        return out.view(-1, *self.shape), squares

    def add_to(self, out: Tensor) -> None:
        for a, b, left, right in self.blocks():
            out[a:b].view(b - a, left.shape[2], -1).baddbmm_(left.mT, right)
