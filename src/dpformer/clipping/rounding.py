"""How far rounding can take a norm below the truth: a clip factor must never be too large.

A sum of n products that was rounded n times is off by at most n·u of the sum of their sizes, in whatever order it was
taken (Higham 2002, section 3.1), with u = 2⁻²⁴ in float32. The sizes can be much larger than the sum: rows of a user
that cancel leave a small gradient and a large error. With K_b = Σ_t ‖g_bt‖, the sum of the lengths of what single rows
contribute, and n_b the number of rows that are not zero (row_lengths.py):

- written out, or added up for all users: ‖g_b‖ is off by n_b·u·K_b, each;
- inner products of rows are in float64, so that ‖g_b‖² is off by (width + n_b²)·2⁻⁵³·K_b².

Products of very small and very large numbers also vanish or overflow on the way; what can vanish is in the bounds.

A bound is made of the user's own rows and of public sizes, never of the way that was taken. Users whose rows cancel
more than `CANCEL`-fold, or whose bound is above `LOOSE`, are computed alone in float64.

docs/maths/phantom-clipping.md has the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping.row_lengths import RowLengths
from dpformer.clipping.squares import can_square, squares_of_rows
from dpformer.clipping.uses import Use, wide

LOOSE = 0.04  # a square that may be off by a larger share is computed again in float64
CANCEL = 64.0  # and one whose rows are longer than this many times the gradient
PIECE = 1 << 12  # numbers squared and added up at once
_MARGIN = 1.01  # for the rounding of the bounds themselves


class full_precision:
    """Products of float32 numbers are in float32: not under autocast, and not with TF32 or bfloat16 inside.

    A class, since it is entered for every layer, and a generator takes as long as what is done inside.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before, self.cast = torch.get_float32_matmul_precision(), torch.is_autocast_enabled(self.device)
        if self.before != "highest":
            torch.set_float32_matmul_precision("highest")
        if self.cast:
            torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *_: object) -> None:
        if self.before != "highest":
            torch.set_float32_matmul_precision(self.before)
        if self.cast:
            torch.set_autocast_enabled(self.device, True)


def unit(dtype: torch.dtype) -> float:
    """u: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


class WithRows(Protocol):
    """The uses of one parameter, and the lengths of their rows."""

    @property
    def uses(self) -> Sequence[Use]: ...
    @property
    def lengths(self) -> RowLengths: ...


@dataclass(slots=True)
class Rows:
    """What each user's rows say about rounding, for G parameters of one precision; in float64."""

    lengths: np.ndarray  # (G, B) K_b
    counts: np.ndarray  # (G, B) n_b
    uses: np.ndarray  # (G, 1) how many uses
    numbers: np.ndarray  # (G, 1) of the parameter
    shares: np.ndarray  # (G, 1) of a square, for the numbers of the parameter
    dtype: torch.dtype  # of the uses

    @staticmethod
    def of(some: Sequence[WithRows], dtype: torch.dtype) -> Rows:
        lengths = np.stack([one.lengths.total for one in some])
        counts = np.stack([one.lengths.count for one in some])
        public = [(len(one.uses), n := prod(one.uses[0].shape), share(n, dtype)) for one in some]
        uses, numbers, shares = np.array(public, dtype=np.float64).T[:, :, None]
        return Rows(lengths, counts, uses, numbers, shares, dtype)


def square_error(square: np.ndarray, rows: Rows) -> np.ndarray:
    """(G, B) what the square of a norm may lack, whichever way it was computed; another one is made for the sum."""
    lost = np.where(rows.counts == 0, 0.0, rows.numbers * smallest(rows.dtype))
    apart = _MARGIN * 2 * unit(rows.dtype) * (rows.counts + rows.uses + 8.0) * rows.lengths + rows.counts * lost
    inner = unit(torch.float64) * (rows.numbers + rows.counts**2 + 8.0) * rows.lengths**2
    known = np.maximum(square, 0)
    return 2 * apart * np.sqrt(known) + apart**2 + _MARGIN * (rows.shares * known + lost + inner)


def smallest(dtype: torch.dtype) -> float:
    """What a product may lose that is too small for a number: some processors take all such products for zero."""
    return torch.finfo(dtype).tiny


def squared_lengths(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n) → (B,) ‖row‖² as computed, and what it is at most, in `wide` precision."""
    square, numbers = sums_of_squares(rows), rows.shape[1]
    return square, square * (1 + share(numbers, rows.dtype)) + numbers * smallest(rows.dtype)


def sums_of_squares(rows: Tensor) -> Tensor:
    """(B, n) → (B,) in `wide` precision: long rows are added up piece by piece."""
    if can_square([rows]):
        return squares_of_rows([rows])
    if rows.device.type != "cpu" and wide(rows.device) is torch.float64:  # in one call: what is read takes the time
        in_wide = torch.promote_types(rows.dtype, torch.float64)
        return torch.linalg.vector_norm(rows, dim=1, dtype=in_wide).square_()
    users, numbers = rows.shape
    whole = numbers - numbers % PIECE
    if whole == 0:
        return torch.linalg.vector_norm(rows, dim=1).to(wide(rows.device)).square_()
    pieces = torch.linalg.vector_norm(rows[:, :whole].view(users, -1, PIECE), dim=2)  # (B, n / PIECE)
    total = pieces.to(wide(rows.device)).square_().sum(1)
    return total if whole == numbers else total + sums_of_squares(rows[:, whole:])


def share(numbers: int, dtype: torch.dtype) -> float:
    """Of the square of a row of so many numbers: what it may lack."""
    return _MARGIN * (min(numbers, PIECE) + 8.0) * unit(dtype)


def raised(upper: Tensor, dtype: torch.dtype) -> Tensor:
    """Norms from upper bounds of their squares, with room for the rounding of factor and product."""
    return upper.sqrt().to(dtype) * (1 + 16 * unit(dtype))
