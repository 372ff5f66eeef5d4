"""The algebra of uses: what one use of a parameter contributes to each user's gradient.

Indices: b user, t position (row of that user), the parameter has `shape`. A use knows three things:
`dense()`, the gradients written out, (B, *shape) (`add_to` adds them to others); `add_sum(c, out)`, out += Σ_b c_b g_b;
and, for pairs of kinds with a closed form, the inner products ⟨g_b, g'_b⟩ without writing anything out (`inner` below).

| kind      | gradient of user b                     | from                                                     |
| --------- | -------------------------------------- | -------------------------------------------------------- |
| Outer     | Σ_t left_bt ⊗ right_bt                 | linear layers, matmul, convolution                       |
| Ragged    | the same, with unequal numbers of rows | the softmax head                                         |
| Lookup    | Σ_t onehot(id_bt) ⊗ grad_bt            | embeddings                                               |
| Dense     | grad_b                                 | biases, LayerNorm, positions, scales: small parameters   |

‖Σ_a g⁽ᵃ⁾‖² = Σ_{a,a'} ⟨g⁽ᵃ⁾, g⁽ᵃ'⟩ (errata 4), so a parameter used many times needs no special case: uses of one kind
join (their rows are concatenated), and different kinds meet in a cross term.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

PASSES = 16.0  # multiply-adds in the time in which a number goes to memory and back


@dataclass
class Outer:
    """g_b = Σ_t left_bt ⊗ right_bt, reshaped to the parameter."""

    left: Tensor  # (B, T, Q)
    right: Tensor  # (B, T, P)
    shape: tuple[int, ...]  # Q·P numbers

    def part(self, a: int, b: int) -> Outer:
        return Outer(self.left[a:b], self.right[a:b], self.shape)

    def dense(self) -> Tensor:
        return torch.bmm(self.left.mT, self.right).reshape(-1, *self.shape)

    def add_to(self, out: Tensor) -> None:
        out.view(len(out), self.left.shape[2], -1).baddbmm_(self.left.mT, self.right)

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        left, right = self.left.flatten(0, 1), self.right.flatten(0, 1)
        scale = c.repeat_interleave(self.left.shape[1])[:, None]
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

    def dense(self) -> Tensor:
        out = self.left.new_empty(len(self.counts), self.left.shape[1], self.right.shape[1])
        for a, b, left, right in self.blocks():
            torch.bmm(left.mT, right, out=out[a:b])
        return out.view(-1, *self.shape)

    def add_to(self, out: Tensor) -> None:
        for a, b, left, right in self.blocks():
            out[a:b].view(b - a, left.shape[2], -1).baddbmm_(left.mT, right)


@dataclass
class Lookup:
    """g_b = Σ_t onehot(id_bt) ⊗ grad_bt: rows of a table, read by index."""

    ids: Tensor  # (B, T) int64
    grad: Tensor  # (B, T, D)
    shape: tuple[int, ...]  # (M, …) with D numbers a row

    def part(self, a: int, b: int) -> Lookup:
        return Lookup(self.ids[a:b], self.grad[a:b], self.shape)

    def dense(self) -> Tensor:
        out = self.grad.new_zeros(len(self.ids), *self.shape)
        self.add_to(out)
        return out

    def add_to(self, out: Tensor) -> None:
        offset = torch.arange(len(self.ids), device=self.ids.device)[:, None] * self.shape[0]
        rows = out.view(len(out) * self.shape[0], self.grad.shape[-1])
        rows.index_add_(0, (self.ids + offset).flatten(), self.grad.flatten(0, 1))

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        scaled = (self.grad * c[:, None, None]).flatten(0, 1)
        out.view(self.shape[0], self.grad.shape[-1]).index_add_(0, self.ids.flatten(), scaled)

    def keep(self, users: Tensor) -> None:
        self.grad = self.grad.masked_fill(~users[:, None, None], 0)

    @staticmethod
    def join(uses: Sequence[Lookup]) -> Lookup:
        if len(uses) == 1:
            return uses[0]
        return Lookup(torch.cat([u.ids for u in uses], 1), torch.cat([u.grad for u in uses], 1), uses[0].shape)


@dataclass
class Dense:
    """g_b itself, for parameters so small that a copy a user costs nothing."""

    grad: Tensor  # (B, *shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.grad.shape[1:])

    def part(self, a: int, b: int) -> Dense:
        return Dense(self.grad[a:b])

    def dense(self) -> Tensor:
        return self.grad

    def add_to(self, out: Tensor) -> None:
        out += self.grad

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        out += (c @ self.grad.reshape(len(c), -1)).reshape(self.shape)

    def keep(self, users: Tensor) -> None:
        self.grad = self.grad.masked_fill(~users.reshape(-1, *[1] * (self.grad.ndim - 1)), 0)

    @staticmethod
    def join(uses: Sequence[Dense]) -> Dense:
        return uses[0] if len(uses) == 1 else Dense(torch.stack([u.grad for u in uses]).sum(0))


Use = Outer | Ragged | Lookup | Dense


def squared(use: Use) -> tuple[Tensor, Tensor]:
    """(B,) ‖g_b‖² without writing g_b out, and Σ_t ‖g_bt‖²: its size if no two rows overlapped.

    The second is the scale against which rounding counts: where the first is much smaller, rows have cancelled.
    """
    if isinstance(use, Ragged):
        blocks = [squared(Outer(left, right, use.shape)) for _, _, left, right in use.blocks()]
        return torch.cat([whole for whole, _ in blocks]), torch.cat([rows for _, rows in blocks])
    if isinstance(use, Outer):  # ghost norm (Goodfellow 2015; Li et al. 2022)
        gram = torch.bmm(use.left, use.left.mT).mul_(torch.bmm(use.right, use.right.mT))
        return gram.sum((1, 2)), gram.diagonal(dim1=1, dim2=2).sum(1)
    assert isinstance(use, Lookup)
    return _lookup_squared(use), use.grad.square().sum((1, 2))


def inner(one: Use, other: Use) -> Tensor:
    """⟨g_b, g'_b⟩ of two uses for each user, shape (B,), without writing either out."""
    if not isinstance(one, Ragged):
        one, other = other, one
    if isinstance(one, Ragged):
        assert not isinstance(other, Ragged)  # two ragged uses are written out
        parts = (inner(Outer(left, right, one.shape), other.part(a, b)) for a, b, left, right in one.blocks())
        return torch.cat(list(parts))
    if isinstance(one, Lookup):
        one, other = other, one
    assert isinstance(one, Outer)
    if isinstance(other, Lookup):
        return _lookup_outer(other, one)
    assert isinstance(other, Outer)
    return (torch.bmm(one.left, other.left.mT) * torch.bmm(one.right, other.right.mT)).sum((1, 2))


def _lookup_squared(use: Lookup) -> Tensor:
    """Σ_{t,u} 1[id_t = id_u] ⟨grad_t, grad_u⟩, by summing the rows that read the same entry first."""
    users, rows = use.ids.shape[0], use.shape[0]
    offset = torch.arange(users, device=use.ids.device)[:, None] * rows
    entries, place = torch.unique((use.ids + offset).flatten(), return_inverse=True)
    sums = use.grad.new_zeros(len(entries), use.grad.shape[-1]).index_add_(0, place, use.grad.flatten(0, 1))
    return sums.new_zeros(users).index_add_(0, entries // rows, sums.square().sum(1))


def _lookup_outer(lookup: Lookup, outer: Outer) -> Tensor:
    """Σ_{t,u} left_u[id_t] ⟨grad_t, right_u⟩: the cross term of a tied embedding (errata 1)."""
    users, _, width = outer.left.shape
    if width != lookup.shape[0]:  # the table was reshaped between the two uses: only the dense form is common
        return (lookup.dense() * outer.dense()).flatten(1).sum(1)
    index = lookup.ids[:, None, :].expand(users, outer.left.shape[1], lookup.ids.shape[1])
    return (outer.left.gather(2, index) * torch.bmm(outer.right, lookup.grad.mT)).sum((1, 2))


def gram_cost(uses: Sequence[Use]) -> float:
    """Multiply-adds a user of all the inner products, or infinity where one has no closed form."""
    if any(isinstance(use, Dense) for use in uses) or sum(isinstance(use, Ragged) for use in uses) > 1:
        return float("inf")  # what is written out already is simply added to the others
    return sum(_pair_cost(one, other) for i, one in enumerate(uses) for other in uses[i:])


def _pair_cost(one: Use, other: Use) -> float:
    if isinstance(one, Lookup):
        one, other = other, one
    if isinstance(one, Lookup):
        return 8.0 * one.grad.shape[1] * one.grad.shape[2]
    assert isinstance(one, (Outer, Ragged))
    if isinstance(other, Lookup):
        return rows_each(one) * other.ids.shape[1] * (other.grad.shape[2] + 4.0)
    assert isinstance(other, (Outer, Ragged))
    return rows_each(one) * rows_each(other) * float(one.left.shape[-1] + one.right.shape[-1])


def dense_cost(uses: Sequence[Use], kept: bool) -> float:
    """Multiply-adds a user of writing the gradient out, beyond what the inner products need as well: the clipped sum.

    What is written out and kept makes the sum too, so then its product is not counted; a number that is written and
    read back counts as several multiply-adds.
    """
    numbers = prod(uses[0].shape)
    cost = PASSES * numbers
    for use in uses:
        if isinstance(use, (Outer, Ragged)) and not kept:
            cost += rows_each(use) * numbers
        elif isinstance(use, Lookup):
            cost += 4.0 * use.grad.shape[1] * use.grad.shape[2]
    return cost


def rows_each(use: Outer | Ragged) -> float:
    """Rows of a user, on average."""
    if isinstance(use, Outer):
        return float(use.left.shape[1])
    return len(use.left) / max(1, len(use.counts))
