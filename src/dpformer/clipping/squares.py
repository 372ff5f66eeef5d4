"""Sums of squares of rows in float64, by compiled code: nothing of float32 overflows or vanishes in them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from dpformer.kernels import native


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
