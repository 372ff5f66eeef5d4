"""How long the rows of each user are: what its gradient is made of says how much of it rounding may take.

A row t of user b contributes g_bt, whose length is the product of its two sides' lengths. K_b = Σ_t ‖g_bt‖ is what the
gradient would be if nothing cancelled; n_b counts the rows that are not zero. A bound of a length, of the row itself,
serves as well: residuals of the softmax head are not read for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpformer.clipping.uses import Dense, Lookup, Outer, Ragged, Use, wide


@dataclass(frozen=True)
class RowLengths:
    """Of the uses of one parameter, before any of them are added up, in `wide` precision."""

    each: list[Tensor]  # of a use: (B, T), or (N,) where it is ragged, ‖g_bt‖
    counts: list[Tensor]  # of a use: (B,) n_b, rows that are not zero
    total: Tensor  # (B,) K_b of all uses

    @staticmethod
    def of(uses: Sequence[Use]) -> RowLengths:
        each = [_each(use) for use in uses]
        real = [(e != 0).to(e.dtype) for e in each]  # what is not a number counts too
        total = sum(_by_user(use, e) for use, e in zip(uses, each, strict=True))
        assert isinstance(total, Tensor)
        return RowLengths(each, [_by_user(use, r) for use, r in zip(uses, real, strict=True)], total)


def _each(use: Use) -> Tensor:
    if isinstance(use, Dense):
        return _lengths(use.grad.reshape(len(use.grad), 1, -1))
    if isinstance(use, Lookup):
        return _lengths(use.grad)
    if isinstance(use, Ragged) and use.long is not None:
        return use.long.to(wide(use.left.device)) * _lengths(use.right)
    return _lengths(use.left) * _lengths(use.right)


def _by_user(use: Use, rows: Tensor) -> Tensor:
    if not isinstance(use, Ragged):
        return rows.sum(1)
    counts = torch.tensor(use.counts).to(rows.device)
    user = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
    return rows.new_zeros(len(counts)).index_add_(0, user, rows)


def _lengths(rows: Tensor) -> Tensor:
    """(…, n) → (…); squares that may vanish or overflow in float32 are taken in `wide` precision too."""
    short = torch.linalg.vector_norm(rows, dim=-1)
    lengths = short.to(wide(rows.device))
    if short.numel() == 0:
        return lengths
    least, most = torch.aminmax(short)
    if float(least) > 1e-12 and float(most) < 1e12:
        return lengths
    odd = ~((short > 1e-12) & (short < 1e12))
    if bool((strange := rows[odd]).any()):  # most are zeros: padding
        in_wide = torch.promote_types(rows.dtype, lengths.dtype)
        lengths[odd] = torch.linalg.vector_norm(strange, dim=-1, dtype=in_wide).to(lengths.dtype)
    return lengths


def some_of(use: Use, users: Tensor) -> Use:
    """What these users have: without a copy, if they follow each other, as they do when sorted by length."""
    places = users.nonzero().flatten().tolist()
    a, b = places[0], places[-1] + 1
    return use.part(a, b) if b - a == len(places) else use.pick(users)


def without_zeros(uses: Sequence[Use], lengths: RowLengths, users: Tensor | None = None) -> list[Use]:
    """The uses of these users (all, unless said), without rows that are zero where most are."""
    out = []
    for use, each, counts in zip(uses, lengths.each, lengths.counts, strict=True):
        if users is not None:
            use = some_of(use, users)
            each, counts = (each, counts) if isinstance(use, Ragged) else (each[users], counts[users])
        if isinstance(use, Outer) and 2 * (most := max(1, int(counts.max()))) <= use.left.shape[1]:
            first = (each != 0).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most, None]
            use = Outer(use.left.take_along_dim(first, 1), use.right.take_along_dim(first, 1), use.shape)
        out.append(use)
    return out
