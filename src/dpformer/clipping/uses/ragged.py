"""Outer products with unequal numbers of rows: what the softmax head contributes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpformer.clipping.products import write_ragged


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
