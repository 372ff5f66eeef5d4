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
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def unit(dtype: torch.dtype) -> float:
    """u: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Rows:
    """What each user's rows say about rounding."""

    lengths: Tensor  # (B,) K_b = Σ_t ‖g_bt‖
    counts: Tensor  # (B,) n_b: rows that are not zero

    @staticmethod
    def of(uses: Sequence[Use]) -> Rows:
        """Over the rows of all uses of a parameter."""
        pairs = [_rows(use) for use in uses]
        return Rows(sum(lengths for lengths, _ in pairs), sum(counts for _, counts in pairs))  # type: ignore[arg-type]


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


def gram_error(square: Tensor, uses: Sequence[Use], rows: Rows) -> Tensor:
    """(B,) what the square of a Gram norm may lack; nothing where there are no inner products to compute."""
    if not closed_form(uses):
        return torch.zeros_like(square)
    steps = 8.0 + max(_widths(use) for use in uses) + len(uses) ** 2 + 2 * rows.counts
    return _MARGIN * unit(square.dtype) * steps * rows.lengths.square()


def _widths(use: Use) -> float:
    """Numbers that are added one after another in an inner product of two rows, at most."""
    if isinstance(use, Lookup):
        return 2.0 * use.grad.shape[-1]
    assert isinstance(use, (Outer, Ragged))
    return _in_blocks(use.left.shape[-1]) + _in_blocks(use.right.shape[-1])


def _in_blocks(width: int) -> float:
    return min(width, BLOCK) + width / BLOCK


def written_error(square: Tensor, uses: Sequence[Use], rows: Rows) -> Tensor:
    """(B,) what the square of a norm may lack whose gradient was written out: it is not the one that is added later."""
    apart = _MARGIN * 2 * unit(square.dtype) * (rows.counts + len(uses) + 8.0) * rows.lengths
    share = _share(prod(uses[0].shape), square.dtype)
    return 2 * apart * square.clamp(min=0).sqrt() + apart.square() + _MARGIN * share * square


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
