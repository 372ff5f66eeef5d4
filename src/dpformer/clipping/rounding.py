"""How far rounding can take a norm below the truth: a clip factor must never be too large.

A sum of n products that was rounded n times is off by at most n·u of the sum of their sizes, in whatever order it was
taken (Higham 2002, section 3.1), with u = 2⁻²⁴ in float32. The sizes can be much larger than the sum: rows of a user
that cancel leave a small gradient and a large error. With K_b = Σ_t ‖g_bt‖, the sum of the lengths of what single rows
contribute, and n_b the number of rows that are not zero:

- written out, or added up for all users: ‖g_b‖ is off by n_b·u·K_b, each;
- inner products of rows are in float64, so that ‖g_b‖² is off by (width + n_b²)·2⁻⁵³·K_b².

Products of very small and very large numbers also vanish or overflow on the way; what can vanish is in the bounds.

A bound is made of the user's own rows and of public sizes, never of the way that was taken. Users whose rows cancel
more than `CANCEL`-fold, or whose bound is above `LOOSE`, are computed alone in float64.

docs/maths/phantom-clipping.md has the argument.

A row t of user b contributes g_bt, whose length is the product of its two sides' lengths. K_b = Σ_t ‖g_bt‖ is what the
gradient would be if nothing cancelled; n_b counts the rows that are not zero. A bound of a length, of the row itself,
serves as well: residuals of the softmax head are not read for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping.uses import Dense, Lookup, Outer, Ragged, Use, wide
from dpformer.kernels import native
from dpformer.kernels.products import can_square, squares_of_rows

# -- how long the rows of each user are --------------------------------------------------------------------------------


LEAST, MOST = 1e-12, 1e12  # lengths whose squares float32 has room for


@dataclass(slots=True)
class RowLengths:
    """Of the uses of one parameter, before any of them are added up: a few numbers a user, so they are NumPy's."""

    counts: Sequence[np.ndarray]  # of a use: (B,) n_b, rows that are not zero
    total: np.ndarray  # (B,) K_b of all uses
    count: np.ndarray  # (B,) n_b of all uses
    large: np.ndarray | None = None  # (B,) whether a side of one of the rows, zero or not, is longer than `MOST`
    each: Sequence[Tensor] | None = None  # of a use: (B, T), or (N,) where it is ragged, ‖g_bt‖; None if all are plain


def row_lengths(many: Sequence[Sequence[Use]]) -> list[RowLengths]:
    """Of the uses of each of many parameters, with as many users."""
    return [_compiled(uses) for uses in many] if all(map(is_plain, many)) else _in_torch(many)


def is_plain(uses: Sequence[Use]) -> bool:
    """Whether compiled code is there, and can read them."""
    return all(native.supports(*_sides(use)) for use in uses)


def _compiled(uses: Sequence[Use]) -> RowLengths:
    assert native.kernels is not None
    told = np.empty((len(uses), _users(uses[0]), 3))
    for place, use in enumerate(uses):
        if isinstance(use, Ragged):
            _measure_ragged(use, told[place])
        else:
            left, right = (*map(_array, _sides(use)), None)[:2]
            native.kernels.measure_rows([left], [right], told[place : place + 1])
    return lengths_of(told)


def _users(use: Use) -> int:
    return len(use.counts) if isinstance(use, Ragged) else len(use.left if isinstance(use, Outer) else use.grad)


@np.errstate(all="ignore")
def _measure_ragged(use: Ragged, told: np.ndarray) -> None:
    """The same of rows that lie one behind the other."""
    sides = [side.numpy() if side.ndim == 1 else squares_of_rows([side]).sqrt_().numpy() for side in _sides(use)]
    each, counts = sides[0] * sides[1], np.array(use.counts, dtype=np.int64)
    some = counts > 0
    starts = (counts.cumsum() - counts)[some]
    told[:] = 0
    if len(starts):
        told[some, 0] = np.add.reduceat(each, starts)
        told[some, 1] = np.add.reduceat(each != 0, starts, dtype=np.float64)  # what is not a number counts too
        told[some, 2] = np.fmax.reduceat(np.fmax(*sides), starts)


def lengths_of(told: np.ndarray) -> RowLengths:
    """(uses, B, 3): K_b, n_b and the longest side of each user's rows, as compiled code tells them."""
    longest, whole = told[..., 2], told[0] if len(told) == 1 else told.sum(0)
    large = None if longest.max(initial=0) <= MOST else np.asarray((longest > MOST).any(0))
    return RowLengths([one[:, 1] for one in told], whole[:, 0], whole[:, 1], large)


def _array(side: Tensor) -> np.ndarray:
    """(B, T, n) whose rows have no gaps."""
    return native.rows_of(side if side.ndim == 3 else side[:, None])


def _in_torch(many: Sequence[Sequence[Use]]) -> list[RowLengths]:
    """Whatever is small is computed for all of them at once."""
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
    each_of, sums_of = zip(*(_by_user(u, p) for (u, _), p in zip(uses, every.split(rows, 1), strict=True)), strict=True)
    sums = torch.stack(sums_of).cpu().double().numpy()
    found = {id(use): pair for (use, _), pair in zip(uses, zip(each_of, sums, strict=True), strict=True)}
    return [_of_one([found[id(u)][1] for u in some], [found[id(u)][0] for u in some]) for some in many]


def _of_one(sums: Sequence[np.ndarray], each: Sequence[Tensor]) -> RowLengths:
    """Of one parameter: K_b, n_b and perhaps a third row of each of its uses."""
    whole = sums[0]
    for some in sums[1:]:
        whole = whole + some
    large = whole[2] > 0 if len(whole) > 2 else None
    return RowLengths([some[1] for some in sums], whole[0], whole[1], large, each)


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
    if can_square([side for side in sides if side.ndim > 1]):
        return _quick_lengths(sides)
    device = sides[0].device
    if (
        device.type != "cpu" and wide(device) is torch.float64
    ):  # squares neither vanish nor overflow, and nothing is read
        return torch.cat([_wide_lengths(side) for side in sides]), True
    each = [side if side.ndim == 1 else torch.linalg.vector_norm(side, dim=-1).view(-1) for side in sides]
    short = torch.cat(each)
    lengths = short.to(wide(short.device), copy=True)
    if short.numel() == 0:
        return lengths, False
    least, most = torch.aminmax(short)
    if not (float(least) > LEAST and float(most) < MOST):
        _correct(sides, ~((short > LEAST) & (short < MOST)), lengths)
    return lengths, not float(most) < MOST


def _wide_lengths(side: Tensor) -> Tensor:
    """The lengths of the rows of one side in float64."""
    if side.ndim == 1:
        return side.double()
    return torch.linalg.vector_norm(side, dim=-1, dtype=torch.promote_types(side.dtype, torch.float64)).view(-1)


def _quick_lengths(sides: Sequence[Tensor]) -> tuple[Tensor, bool]:
    to_square = [side for side in sides if side.ndim > 1]
    lengths = squares_of_rows(to_square).sqrt_()
    if len(to_square) < len(sides):  # lengths that are known
        parts = iter(lengths.split([_count(side) for side in to_square]))
        lengths = torch.cat([side.to(lengths.dtype) if side.ndim == 1 else next(parts) for side in sides])
    return lengths, not (lengths.numel() == 0 or float(lengths.max()) < MOST)


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


def some_of(use: Use, users: np.ndarray) -> Use:
    """What these users have: without a copy, if they follow each other, as they do when sorted by length."""
    places = np.flatnonzero(users)
    a, b = int(places[0]), int(places[-1]) + 1
    return use.part(a, b) if b - a == len(places) else use.pick(torch.from_numpy(users))


def without_zeros(uses: Sequence[Use], lengths: RowLengths, users: np.ndarray | None = None) -> list[Use]:
    """The uses of these users (all, unless said), without rows that are zero where most are."""
    out = []
    for place, (use, counts) in enumerate(zip(uses, lengths.counts, strict=True)):
        if users is not None:
            use = some_of(use, users)
            counts = counts if isinstance(use, Ragged) else counts[users]
        if isinstance(use, Outer) and 2 * (most := max(1, int(counts.max()))) <= use.left.shape[1]:
            if lengths.each is None:
                use = _packed(use, most)
            else:
                each = lengths.each[place] if users is None else lengths.each[place][torch.from_numpy(users)]
                first = (each != 0).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most, None]
                use = Outer(use.left.take_along_dim(first, 1), use.right.take_along_dim(first, 1), use.shape)
        out.append(use)
    return out


def _packed(use: Outer, most: int) -> Outer:
    """Rows that are not zero, at most `most` of each user, by compiled code."""
    assert native.kernels is not None
    left, right = (side.new_empty(len(side), most, side.shape[2]) for side in (use.left, use.right))
    native.kernels.pack_rows(_array(use.left), _array(use.right), left.numpy(), right.numpy())
    return Outer(left, right, use.shape)


# -- bounds ------------------------------------------------------------------------------------------------------------


LOOSE = 0.04  # a square that may be off by a larger share is computed again in float64
CANCEL = 64.0  # and one whose rows are longer than this many times the gradient
PIECE = 1 << 12  # numbers squared and added up at once
_MARGIN = 1.01  # for the rounding of the bounds themselves


class full_precision:
    """Products of float32 numbers are in float32: not under autocast, and not with TF32 or bfloat16 inside.

    A class, since it is entered for every layer, and a generator takes as long as what is done inside.
    """

    _lock, _entered, _before = threading.Lock(), 0, "highest"  # the precision is that of all threads

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        cls, self.cast = full_precision, torch.is_autocast_enabled(self.device)
        with cls._lock:
            if not cls._entered:
                cls._before = torch.get_float32_matmul_precision()
                if cls._before != "highest":
                    torch.set_float32_matmul_precision("highest")
            cls._entered += 1
        if self.cast:
            torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *_: object) -> None:
        cls = full_precision
        with cls._lock:
            cls._entered -= 1
            if not cls._entered and cls._before != "highest":
                torch.set_float32_matmul_precision(cls._before)
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
