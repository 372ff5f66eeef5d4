"""How long the rows of each user are: what its gradient is made of says how much of it rounding may take.

A row t of user b contributes g_bt, whose length is the product of its two sides' lengths. K_b = Σ_t ‖g_bt‖ is what the
gradient would be if nothing cancelled; n_b counts the rows that are not zero. A bound of a length, of the row itself,
serves as well: residuals of the softmax head are not read for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from dpformer.clipping.uses import Dense, Lookup, Outer, Ragged, Use, wide

LEAST, MOST = 1e-12, 1e12  # lengths whose squares float32 has room for


@dataclass(frozen=True)
class RowLengths:
    """Of the uses of one parameter, before any of them are added up, in `wide` precision."""

    each: list[Tensor]  # of a use: (B, T), or (N,) where it is ragged, ‖g_bt‖
    counts: list[Tensor]  # of a use: (B,) n_b, rows that are not zero
    total: Tensor  # (B,) K_b of all uses
    count: Tensor  # (B,) n_b of all uses
    large: Tensor | None = None  # (B,) whether a side of one of the rows, zero or not, is longer than `MOST`


def row_lengths(many: Sequence[Sequence[Use]]) -> list[RowLengths]:
    """Of the uses of each of many parameters: whatever is small is computed for all of them at once."""
    uses = [(use, _sides(use)) for some in many for use in some]
    uses.sort(key=lambda pair: len(pair[1]), reverse=True)  # those with two sides come first
    rows = [_count(sides[0]) for _, sides in uses]
    lengths, large = _lengths([sides[0] for _, sides in uses] + [side for _, sides in uses for side in sides[1:]])
    each, pairs = lengths[: sum(rows)], len(lengths) - sum(rows)
    told = [each, each]
    if large:
        over = (lengths > MOST).to(each.dtype)
        over[:pairs] += over[sum(rows) :]
        told.append(over[: sum(rows)])
    each[:pairs] *= lengths[sum(rows) :]
    told[1] = (each != 0).to(each.dtype)  # what is not a number counts too
    every = torch.stack(told)
    found = {id(use): _by_user(use, part) for (use, _), part in zip(uses, every.split(rows, 1), strict=True)}
    return [_of_one([found[id(use)] for use in some]) for some in many]


def _of_one(uses: Sequence[tuple[Tensor, Tensor]]) -> RowLengths:
    each, sums = (list(part) for part in zip(*uses, strict=True))
    whole = sums[0]
    for some in sums[1:]:
        whole = whole + some
    return RowLengths(each, [some[1] for some in sums], whole[0], whole[1], whole[2] > 0 if len(whole) > 2 else None)


def _sides(use: Use) -> list[Tensor]:
    """Rows whose lengths are multiplied, (…, n); lengths themselves, (N,), where they are known."""
    if isinstance(use, Dense):
        return [use.grad.reshape(len(use.grad), -1)]
    if isinstance(use, Lookup):
        return [use.grad]
    return [use.left if isinstance(use, Outer) or use.long is None else use.long, use.right]


def _count(side: Tensor) -> int:
    """Of rows."""
    return len(side) if side.ndim == 1 else prod(side.shape[:-1])


def _by_user(use: Use, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths of rows and what else is told of them, (n, rows) → the lengths; all summed over a user's rows, (n, B)."""
    if isinstance(use, Ragged):
        counts = torch.tensor(use.counts).to(rows.device)
        user = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
        return rows[0], rows.new_zeros(len(rows), len(counts)).index_add_(1, user, rows)
    users = len(use.left if isinstance(use, Outer) else use.grad)
    spread = rows.view(len(rows), users, rows.shape[1] // max(1, users))
    return spread[0], spread.sum(2)


def _lengths(sides: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """The lengths of the rows of all sides in `wide` precision, and whether some may be above `MOST`."""
    each = [side if side.ndim == 1 else torch.linalg.vector_norm(side, dim=-1).view(-1) for side in sides]
    short = torch.cat(each)
    lengths = short.to(wide(short.device), copy=True)
    if short.numel() == 0:
        return lengths, False
    least, most = torch.aminmax(short)
    if not (float(least) > LEAST and float(most) < MOST):
        _correct(sides, ~((short > LEAST) & (short < MOST)), lengths)
    return lengths, not float(most) < MOST


def _correct(sides: Sequence[Tensor], odd: Tensor, lengths: Tensor) -> None:
    """Squares that vanish or overflow in float32 are taken in `wide` precision too."""
    ends = list(accumulate(map(_count, sides)))
    place = torch.bucketize(odd.nonzero()[:, 0].cpu(), torch.tensor(ends), right=True)
    for n in torch.unique_consecutive(place).tolist():
        side, here = sides[n], slice(ends[n - 1] if n else 0, ends[n])
        if side.ndim == 1:
            continue
        strange = side[odd[here].view(side.shape[:-1])]
        if bool(strange.any()):  # most are zeros: padding
            in_wide = torch.promote_types(side.dtype, lengths.dtype)
            lengths[here][odd[here]] = torch.linalg.vector_norm(strange, dim=-1, dtype=in_wide).to(lengths.dtype)


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
