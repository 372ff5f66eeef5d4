"""How far rounding can take a norm below the truth: a clip factor must never be too large.

A norm in float32 is a sum of many products, and a sum of n products that was rounded n times is off by at most n·u of
the sum of their sizes, in whatever order it was taken (Higham 2002, section 3.1), with u = 2⁻²⁴. The sizes can be much
larger than the sum: rows of a user that cancel leave a small gradient and a large error. With K_b = Σ_t ‖g_bt‖, the sum
of the lengths of what single rows contribute, and n_b the number of rows that are not zero:

- Gram: ‖g_b‖² ≤ (computed) + ε·K_b², with ε = (widths + 2·n_b)·u;
- written out: ‖g_b‖ ≤ (computed) + 2·n_b·u·K_b.

A bound is made of the user's own rows and of public sizes, never of how the norms were computed: which way is the
cheaper one, and how far rows are padded, depends on who else is in the micro-batch, and nobody may change the factors
of others. So a norm is raised by the larger of the two, up to `LOOSE`; where that does not cover the way it was
computed, it is computed again for that user alone, in float64, and raised by `LOOSE` as well.

docs/maths/phantom-clipping.md has the argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dpformer.clipping.uses import BLOCK, Dense, Lookup, Outer, Ragged, Use, closed_form

LOOSE = 0.04  # a square that may be off by a larger share is computed again in float64
_PIECE = 1 << 12  # numbers squared and added up at once
_MARGIN = 1.01  # for the rounding of the bounds themselves


@contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Products of float32 numbers are in float32: not under autocast, and not with TF32 or bfloat16 inside."""
    before, cast = torch.get_float32_matmul_precision(), torch.is_autocast_enabled(device)
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    if cast:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)
        if cast:
            torch.set_autocast_enabled(device, True)


def unit(dtype: torch.dtype) -> float:
    """u: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Rows:
    """What each user's rows say about rounding, for G parameters."""

    lengths: Tensor  # (G, B) K_b = Σ_t ‖g_bt‖ over the rows of all uses of a parameter
    counts: Tensor  # (G, B) n_b: rows that are not zero
    uses: Tensor  # (G, 1) how many uses
    widths: Tensor  # (G, 1) numbers added up in an inner product of two rows; negative: there are none to compute
    shares: Tensor  # (G, 1) of a square, for the numbers of the parameter

    @staticmethod
    def of(groups: Sequence[Sequence[Use]], like: Tensor) -> Rows:
        """Of the uses of each parameter; `like` has the type and the device."""
        lengths, counts = zip(*map(_rows_of_all, groups), strict=True)
        public = [
            (float(len(uses)), _widest(uses), _share(prod(uses[0].shape), like.dtype)) for uses in groups
        ]  # sizes
        columns = torch.tensor(public, dtype=torch.float64).to(like).split(1, dim=1)
        return Rows(torch.stack(lengths), torch.stack(counts), *columns)


def _rows_of_all(uses: Sequence[Use]) -> tuple[Tensor, Tensor]:
    lengths, counts = _rows(uses[0])
    for use in uses[1:]:
        more = _rows(use)
        lengths, counts = lengths + more[0], counts + more[1]
    return lengths, counts


def _rows(use: Use) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm
    if isinstance(use, Outer):
        return _added(norm(use.left, dim=-1) * norm(use.right, dim=-1))
    if isinstance(use, Ragged):
        each = norm(use.left, dim=-1) * norm(use.right, dim=-1)
        counts = torch.tensor(use.counts).to(each.device)
        user = torch.arange(len(counts), device=each.device).repeat_interleave(counts)
        none = each.new_zeros(len(counts))
        return none.index_add(0, user, each), none.index_add(0, user, (each > 0).to(each.dtype))
    if isinstance(use, Lookup):
        return _added(norm(use.grad, dim=-1))
    assert isinstance(use, Dense)
    return _added(norm(use.grad.reshape(len(use.grad), -1), dim=1, keepdim=True))


def _added(each: Tensor) -> tuple[Tensor, Tensor]:
    return each.sum(1), (each > 0).sum(1).to(each.dtype)


def gram_error(square: Tensor, rows: Rows) -> Tensor:
    """(G, B) what the square of a Gram norm may lack; nothing where there are no inner products to compute."""
    steps = 8.0 + rows.widths + rows.uses.square() + 2 * rows.counts
    error = _MARGIN * unit(square.dtype) * steps * rows.lengths.square()
    return error.masked_fill(rows.widths < 0, 0)


def _widest(uses: Sequence[Use]) -> float:
    return max(_widths(use) for use in uses) if closed_form(uses) else -1.0


def _widths(use: Use) -> float:
    """Numbers that are added one after another in an inner product of two rows, at most."""
    if isinstance(use, Lookup):
        return 2.0 * use.grad.shape[-1]
    assert isinstance(use, (Outer, Ragged))
    return _in_blocks(use.left.shape[-1]) + _in_blocks(use.right.shape[-1])


def _in_blocks(width: int) -> float:
    return min(width, BLOCK) + width / BLOCK


def written_error(square: Tensor, rows: Rows) -> Tensor:
    """(G, B) what the square of a norm may lack whose gradient was written out: another one is added later."""
    apart = _MARGIN * 2 * unit(square.dtype) * (rows.counts + rows.uses + 8.0) * rows.lengths
    return 2 * apart * square.clamp(min=0).sqrt() + apart.square() + _MARGIN * rows.shares * square


def squared_lengths(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n) → (B,) ‖row‖², and an upper bound: long rows are added up piece by piece."""
    users, numbers = rows.shape
    whole = numbers - numbers % _PIECE if numbers > _PIECE else 0
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1).square()
    if whole:
        pieces = torch.linalg.vector_norm(rows[:, :whole].view(users, -1, _PIECE), dim=2)  # (B, n / PIECE)
        rest = (pieces.double().square().sum(1) + rest).to(rest.dtype)
    return rest, rest * (1 + _share(numbers, rest.dtype))


def _share(numbers: int, dtype: torch.dtype) -> float:
    """Of the square of a row of so many numbers: what it may lack."""
    return _MARGIN * (min(numbers, _PIECE) + 8.0) * unit(dtype)


def raised(upper: Tensor, dtype: torch.dtype) -> Tensor:
    """Norms from upper bounds of their squares, with room for the rounding of factor and product."""
    return upper.to(dtype).sqrt() * (1 + 16 * unit(dtype))
