"""Users' gradients from their rows, by compiled code: the same bits whatever other users are in the batch.

A matrix library may add up the same rows in another order when they are padded to another length. Then one user with a
long history changes how the gradients of others round: by 10⁻⁷ of them, and by 64 times as much where rows cancel. Here
each number is a sum over the rows in their order, to which padding adds zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dpformer.kernels import native

LARGE = 1 << 22  # multiply-adds that are worth several threads
A_FEW = 1 << 17  # numbers that are written only for their squares
_pools: dict[int, ThreadPoolExecutor] = {}


def products(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor | None]:
    """(B, T, Q), (B, T, P) → (B, Q, P): Σ_t left_bt ⊗ right_bt; and its sums of squares, (B,), if they came with it."""
    out = left.new_empty(len(left), left.shape[2], right.shape[2])
    return out, write_products(left, right, out)


class Scratch:
    """Memory for products that are read at once and not kept, of one parameter after the other.

    Fresh blocks of that size would each find a place of their own between what the self-check holds.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """As `products`, until it is called again."""
        size = len(left), left.shape[2], right.shape[2]
        if self.memory is None or self.memory.dtype != left.dtype or self.memory.numel() < prod(size):
            self.memory = left.new_empty(prod(size))
        out = self.memory[: prod(size)].view(size)
        write_products(left, right, out)
        return out

    def views(self, sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Room for tensors of float32 on the CPU of which only one is needed at a time."""
        most = max(map(prod, sizes), default=0)
        if self.memory is None or self.memory.dtype != torch.float32 or self.memory.numel() < most:
            self.memory = torch.empty(most)
        return [self.memory[: prod(size)].view(size) for size in sizes]


def write_products(left: Tensor, right: Tensor, out: Tensor) -> Tensor | None:
    """The same into a tensor without gaps."""
    if not can_multiply(left, right):
        torch.bmm(left.mT, right, out=out)
        return None
    squares = torch.empty(len(left), dtype=torch.float64)
    _write(native.rows_of(left), native.rows_of(right), out.numpy(), squares.numpy())
    return squares


def write_ragged(left: Tensor, right: Tensor, counts: Sequence[int], out: Tensor) -> Tensor | None:
    """The same of users with unequal numbers of rows, (N, Q) and (N, P) packed user by user; None if nothing is written
    since compiled code cannot."""
    if not can_multiply(left, right):
        return None
    squares = torch.empty(len(counts), dtype=torch.float64)
    arrays = native.rows_of(left), native.rows_of(right), np.array(counts, dtype=np.int64), out.numpy(), squares.numpy()

    def write(first: int, last: int) -> None:
        assert native.kernels is not None
        native.kernels.write_ragged(*arrays, first, last)

    threads = len(parts_of(len(counts), left.numel() * right.shape[1]))
    ends = np.searchsorted(arrays[2].cumsum(), [len(left) * part // threads for part in range(1, threads)]).tolist()
    in_parts(write, list(pairwise([0, *ends, len(counts)])))  # as many rows for each thread
    return squares


def measured_products(
    left: Tensor, right: Tensor, reach: float, keep: bool = True
) -> tuple[np.ndarray, tuple[Tensor, Tensor] | None]:
    """What `row_lengths.told` says of these rows, and the products with their squares, of plain tensors.

    No products where everybody has fewer rows than `reach`. One thread reads rows and multiplies them while they are in
    the cache. Products that nobody keeps are made of a few users at a time, and only the squares are right.
    """
    assert native.kernels is not None
    one, other, told = native.rows_of(left), native.rows_of(right), np.empty((len(left), 3))
    if _threads(one, other) > 1:
        native.kernels.measure_rows([one], [other], told)
        return told, None if bool((told[:, 1] < reach).all()) else cast(tuple[Tensor, Tensor], products(left, right))
    users, numbers = len(left), left.shape[2] * right.shape[2]
    step = users if keep else min(users, max(1, A_FEW // max(1, numbers)))
    out, squares = torch.empty(step, left.shape[2], right.shape[2]), torch.empty(users, dtype=torch.float64)
    room, square, written = out.numpy(), squares.numpy(), False
    for a in range(0, users, max(1, step)):
        b = min(a + step, users)
        parts = one[a:b], other[a:b], room[: b - a], square[a:b], told[a:b]
        written |= native.kernels.write_products(*parts, reach)
    return told, (out, squares) if written else None


def gram_squares(left: Tensor, right: Tensor) -> Tensor:
    """(B,) the same squares, of plain tensors, from inner products of rows in float64 alone."""
    assert native.kernels is not None
    squares = torch.empty(len(left), dtype=torch.float64)
    one, other = native.rows_of(left), native.rows_of(right)
    in_threads(native.kernels.square_by_gram, _threads(one, other), one, other, squares.numpy())
    return squares


def can_weigh(written: Tensor, out: Tensor) -> bool:
    """Whether compiled code adds up such gradients of users into such a sum."""
    return native.reads_tensors() and _is_plain(written) and _is_plain(out)


def _is_plain(t: Tensor) -> bool:
    return t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() and t.numel() > 0 and not t.is_neg()


def add_sums(sums: list[tuple[Tensor, Tensor, bool]], c: Tensor) -> None:
    """out (+)= Σ_b c_b·written_b for each (written, out, whether to add); the same bits by any threads."""
    factors, numbers = c.to(torch.float32).contiguous(), sum(written.numel() for written, _, _ in sums)
    threads = torch.get_num_threads() if numbers >= LARGE else 1

    def add(part: int, parts: int) -> None:
        assert native.kernels is not None
        native.kernels.add_sums(sums, factors, part, parts)

    in_parts(add, [(part, threads) for part in range(threads)])
    if written_to := [out for _, out, adds in sums if adds]:  # torch counts only what it writes itself
        torch.autograd.graph.increment_version(written_to)


def can_multiply(left: Tensor, right: Tensor) -> bool:
    """Whether compiled code does it."""
    return native.multiplies() and native.supports(left, right)


def _threads(left: np.ndarray, right: np.ndarray) -> int:
    """For products of all numbers in a row of one with all in the same row of the other."""
    return min(torch.get_num_threads(), len(left)) if left.size * right.shape[2] >= LARGE else 1


def _write(left: np.ndarray, right: np.ndarray, out: np.ndarray, squares: np.ndarray) -> None:
    assert native.kernels is not None
    in_threads(native.kernels.write_products, _threads(left, right), left, right, out, squares)


def in_threads(work: Callable[..., object], threads: int, *arrays: np.ndarray) -> None:
    """Some users each."""
    if threads <= 1:
        work(*arrays)
    else:
        list(_pool(threads).map(work, *(np.array_split(array, threads) for array in arrays)))


def parts_of(users: int, work: int) -> list[tuple[int, int]]:
    """Users from a to b for each thread, if there are so many multiply-adds."""
    threads = min(torch.get_num_threads(), users) if work >= LARGE else 1
    ends = [users * part // threads for part in range(threads + 1)]
    return list(pairwise(ends))


def in_parts(work: Callable[[int, int], object], parts: Sequence[tuple[int, int]]) -> None:
    """A thread for each part."""
    if len(parts) == 1:
        work(*parts[0])
    else:
        list(_pool(len(parts)).map(work, *zip(*parts, strict=True)))


def _pool(threads: int) -> ThreadPoolExecutor:
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads)
    return _pools[threads]


# -- sums of squares in float64: nothing of float32 overflows or vanishes in them --------------------------------------


def can_square(sides: Sequence[Tensor]) -> bool:
    """Whether compiled code is there, and for all of these (…, n)."""
    return native.supports(*sides) and all(2 <= t.ndim <= 3 for t in sides)


def squares_of_rows(sides: Sequence[Tensor]) -> Tensor:
    """(N,) of all rows, one side after the other; a side that is there several times is read once."""
    assert native.kernels is not None
    places: dict[object, int] = {}
    every = [places.setdefault((t.data_ptr(), t.shape, t.stride()), n) for n, t in enumerate(sides)]
    once = [n for n, place in enumerate(every) if n == place]
    rows = [prod(sides[n].shape[:-1]) for n in once]
    squares = torch.empty(sum(rows), dtype=torch.float64)
    native.kernels.squares_of_rows([native.rows_of(sides[n]) for n in once], squares.numpy())
    if len(once) == len(sides):
        return squares
    parts = dict(zip(once, squares.split(rows), strict=True))
    return torch.cat([parts[place] for place in every])
