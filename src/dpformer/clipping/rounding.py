"""How far rounding can take a norm below the truth: a clip factor must never be too large.

A norm in float32 is a sum of many products, and a sum of n products that was rounded n times is off by at most n·u of
the sum of their sizes, in whatever order it was taken (Higham 2002, section 3.1), with u = 2⁻²⁴. The sizes can be much
larger than the sum: rows of a user that cancel leave a small gradient and a large error. With K_b = Σ_t ‖g_bt‖, the sum
of the lengths of what single rows contribute:

- Gram: ‖g_b‖² ≤ (computed) + ε·K_b², with ε = (numbers added one after another)·u;
- written out: ‖g_b‖ ≤ (computed) + (rows)·u·K_b;
- written out and kept: these very numbers are added to the sum, so they have no error.

docs/maths/phantom-clipping.md has the argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dpformer.clipping.uses import BLOCK, Dense, Lookup, Outer, Ragged, Use

LOOSE = 0.04  # a Gram norm whose square may be off by a larger share is computed the other way
_PIECE = 1 << 16  # numbers squared and added up at once
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


def lengths_of_rows(uses: Sequence[Use]) -> Tensor:
    """(B,) K_b = Σ_t ‖g_bt‖ over the rows of all uses."""
    return torch.stack([_lengths(use) for use in uses]).sum(0)


def _lengths(use: Use) -> Tensor:
    norm = torch.linalg.vector_norm
    if isinstance(use, Outer):
        return (norm(use.left, dim=-1) * norm(use.right, dim=-1)).sum(1)
    if isinstance(use, Ragged):
        each = norm(use.left, dim=-1) * norm(use.right, dim=-1)
        counts = torch.tensor(use.counts).to(each.device)
        user = torch.arange(len(counts), device=each.device).repeat_interleave(counts)
        return each.new_zeros(len(counts)).index_add_(0, user, each)
    if isinstance(use, Lookup):
        return norm(use.grad, dim=-1).sum(1)
    assert isinstance(use, Dense)
    return norm(use.grad.flatten(1), dim=1)


def gram_error(uses: Sequence[Use], sizes: Tensor) -> Tensor:
    """(B,) what the square of a Gram norm may lack."""
    steps = 8.0 + max(_additions(use) for use in uses) + len(uses) ** 2
    return _MARGIN * steps * unit(sizes.dtype) * sizes.square()


def _additions(use: Use) -> float:
    """Numbers that are added one after another in an inner product with this use, at most."""
    if isinstance(use, Lookup):
        return use.ids.shape[1] + 2.0 * use.grad.shape[-1]
    assert isinstance(use, (Outer, Ragged))
    rows = float(use.left.shape[1]) if isinstance(use, Outer) else float(max(use.counts, default=0))
    return _in_blocks(use.left.shape[-1]) + _in_blocks(use.right.shape[-1]) + 2 * rows


def _in_blocks(width: int) -> float:
    return min(width, BLOCK) + width / BLOCK


def written_error(uses: Sequence[Use], sizes: Tensor) -> Tensor:
    """(B,) how far a gradient that is written out may be from the one that is added up later."""
    rows = sum(_rows(use) for use in uses) + len(uses) + 8.0
    return _MARGIN * 2 * rows * unit(sizes.dtype) * sizes


def _rows(use: Use) -> int:
    if isinstance(use, Ragged):
        return max(use.counts, default=0)
    if isinstance(use, Dense):
        return 1
    return use.left.shape[1] if isinstance(use, Outer) else use.ids.shape[1]


def squared_lengths(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n) → (B,) ‖row‖², and an upper bound: long rows are added up piece by piece."""
    users, numbers = rows.shape
    whole = numbers - numbers % _PIECE if numbers > _PIECE else 0
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1).square()
    if whole:
        pieces = torch.linalg.vector_norm(rows[:, :whole].view(users, -1, _PIECE), dim=2)  # (B, n / PIECE)
        rest = (pieces.double().square().sum(1) + rest).to(rest.dtype)
    share = _MARGIN * (min(numbers, _PIECE) + 8.0) * unit(rest.dtype)
    return rest, rest * (1 + share)


def raised(upper: Tensor, dtype: torch.dtype) -> Tensor:
    """Norms from upper bounds of their squares, with room for the rounding of factor and product."""
    return upper.to(dtype).sqrt() * (1 + 16 * unit(dtype))
