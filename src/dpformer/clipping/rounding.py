"""How far rounding can take a norm below the truth: a clip factor must never be too large.

A norm in float32 is a sum of many products, and a sum of n products that was rounded n times is off by at most n·u of
the sum of their sizes, in whatever order it was taken (Higham 2002, section 3.1), with u = 2⁻²⁴. The sizes can be much
larger than the sum: rows of a user that cancel leave a small gradient and a large error. With K_b = Σ_t ‖g_bt‖, the sum
of the lengths of what single rows contribute, and n_b the number of rows that are not zero:

- Gram: ‖g_b‖² ≤ (computed) + ε·K_b², with ε = (widths + 2·n_b)·u;
- written out: ‖g_b‖ ≤ (computed) + 2·n_b·u·K_b.

Products of very small and very large numbers also vanish or overflow on the way; what can vanish is in the bounds, and
where something may overflow there is none.

A bound is made of the user's own rows and of public sizes, never of how the norms were computed: which way is the
cheaper one, and how far rows are padded, depends on who else is in the micro-batch, and nobody may change the factors
of others. So a norm is raised by the larger of the two, up to `LOOSE`; where that does not cover the way it was
computed, it is computed again for that user alone, in float64, and raised by `LOOSE` as well.

docs/maths/phantom-clipping.md has the argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dpformer.clipping.uses import BLOCK, Dense, Lookup, Outer, Ragged, Use, closed_form

Squares = tuple[Tensor, Tensor]  # ‖g_b‖² as computed, and what it is at most, in `wide` precision
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


def wide(device: torch.device) -> torch.dtype:
    """The precision in which bounds are computed: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Rows:
    """What each user's rows say about rounding, for G parameters, in `wide` precision."""

    lengths: Tensor  # (G, B) K_b = Σ_t ‖g_bt‖ over the rows of all uses of a parameter
    counts: Tensor  # (G, B) n_b: rows that are not zero
    left: Tensor  # (G, B) Σ_t of the lengths of their left sides
    right: Tensor  # (G, B) and of their right sides
    uses: Tensor  # (G, 1) how many uses
    widths: Tensor  # (G, 1) numbers added up in an inner product of two rows; negative: there are none to compute
    numbers: Tensor  # (G, 1) of the parameter
    shares: Tensor  # (G, 1) of a square, for the numbers of the parameter

    @staticmethod
    def of(groups: Sequence[Sequence[Use]], like: Tensor) -> Rows:
        """Of the uses of each parameter, before any of them are added up; `like` has type and device of the squares."""
        each = [torch.stack([torch.stack(_rows(use)) for use in uses]).sum(0) for uses in groups]  # (4, B)
        public = [(len(uses), _widest(uses), n := prod(uses[0].shape), _share(n, like.dtype)) for uses in groups]
        columns = torch.tensor(public, dtype=torch.float64).to(like.device, wide(like.device)).split(1, dim=1)
        return Rows(*torch.stack(each, dim=1), *columns)


def _rows(use: Use) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B,) each of `Rows`."""
    if isinstance(use, Dense):
        return _added(torch.ones_like(length := _lengths(use.grad.reshape(len(use.grad), 1, -1))), length)
    if isinstance(use, Lookup):
        return _added(torch.ones_like(length := _lengths(use.grad)), length)
    left, right = _lengths(use.left), _lengths(use.right)
    if isinstance(use, Outer):
        return _added(left, right)
    counts = torch.tensor(use.counts).to(left.device)
    user = torch.arange(len(counts), device=left.device).repeat_interleave(counts)
    none = left.new_zeros(len(counts))
    real = ((left > 0) & (right > 0)).to(left.dtype)
    lengths, n, lefts, rights = (
        none.index_add(0, user, part) for part in (left * right, real, left * real, right * real)
    )
    return lengths, n, lefts, rights


def _added(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    each = left * right
    real = (each > 0).to(left.dtype)
    return each.sum(1), real.sum(1), (left * real).sum(1), (right * real).sum(1)


def _lengths(rows: Tensor) -> Tensor:
    """(…, n) → (…), in `wide` precision; squares that may vanish or overflow in float32 are taken in it too."""
    short = torch.linalg.vector_norm(rows, dim=-1)
    lengths = short.to(wide(rows.device))
    odd = ~((short > 1e-12) & (short < 1e12))
    if bool(odd.any()):
        in_wide = torch.promote_types(rows.dtype, lengths.dtype)
        lengths[odd] = torch.linalg.vector_norm(rows[odd], dim=-1, dtype=in_wide).to(lengths.dtype)
    return lengths


def gram_error(square: Tensor, rows: Rows) -> Tensor:
    """(G, B) what the square of a Gram norm may lack; nothing where there are no inner products to compute."""
    widths = 8.0 + rows.widths + rows.uses.square()
    rounded = unit(square.dtype) * (widths + 2 * rows.counts) * rows.lengths.square()
    vanished = (widths + rows.counts.square()) * (1 + rows.left.square()) * (1 + rows.right.square())
    error = _MARGIN * (rounded + (vanished * smallest(square.dtype)).masked_fill(rows.counts == 0, 0))
    most = torch.finfo(square.dtype).max / 4  # what inner products can hold
    within = torch.stack([rows.lengths, rows.left, rows.right]).amax(0).square() < most
    return error.masked_fill(~within, math.inf).masked_fill(rows.widths < 0, 0)


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
    lost = (rows.numbers * smallest(square.dtype)).expand_as(rows.counts).masked_fill(rows.counts == 0, 0)
    apart = _MARGIN * 2 * unit(square.dtype) * (rows.counts + rows.uses + 8.0) * rows.lengths + rows.counts * lost
    known = square.to(apart.dtype).clamp(min=0)
    return 2 * apart * known.sqrt() + apart.square() + _MARGIN * (rows.shares * known + lost)


def smallest(dtype: torch.dtype) -> float:
    """What a product may lose that is too small for a number: some processors take all such products for zero."""
    return torch.finfo(dtype).tiny


def squared_lengths(rows: Tensor) -> Squares:
    """(B, n) → (B,) ‖row‖², and an upper bound in `wide`: long rows are added up piece by piece."""
    users, numbers = rows.shape
    whole = numbers - numbers % _PIECE if numbers > _PIECE else 0
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1).square()
    if whole:
        pieces = torch.linalg.vector_norm(rows[:, :whole].view(users, -1, _PIECE), dim=2)  # (B, n / PIECE)
        rest = (pieces.to(wide(rows.device)).square().sum(1) + rest).to(rest.dtype)
    upper = rest.to(wide(rows.device)) * (1 + _share(numbers, rest.dtype)) + numbers * smallest(rest.dtype)
    return rest, upper


def _share(numbers: int, dtype: torch.dtype) -> float:
    """Of the square of a row of so many numbers: what it may lack."""
    return _MARGIN * (min(numbers, _PIECE) + 8.0) * unit(dtype)


def raised(upper: Tensor, dtype: torch.dtype) -> Tensor:
    """Norms from upper bounds of their squares, with room for the rounding of factor and product."""
    return upper.sqrt().to(dtype) * (1 + 16 * unit(dtype))
