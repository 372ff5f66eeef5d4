"""Data that a model has turned time first: its second dimension is the batch.

Many models turn their data and turn it back again; the gate keeps track of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.trees import map_tensors, tensors_of


def _named(names: str) -> set[Any]:
    return {getattr(home, name) for home in (Tensor, torch) for name in names.split() if hasattr(home, name)}


TRANSPOSES = _named("t transpose permute swapaxes swapdims movedim moveaxis adjoint") | {
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")
}
RESHAPES = _named("view reshape flatten unflatten squeeze unsqueeze")


def is_turned(t: Tensor) -> bool:
    """Whether the model has turned users' data so that time is the first dimension and the batch the second."""
    return getattr(t, "_phantom_turned", False)


def mark_turned(t: Tensor) -> None:
    t._phantom_turned = True  # type: ignore[attr-defined]


def batch_of(t: Tensor) -> int:
    """The dimension of the batch."""
    return 1 if is_turned(t) else 0


def follow_batch(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> bool:
    """Keeps track of `transpose(0, 1)`: many models turn their data time first and back again.

    Returns whether the batch may have become another dimension.
    """
    if func in TRANSPOSES:
        data = tensors[0]
        if data.ndim < 2:
            return False
        place = _order(func, data.ndim, args, kwargs).index(batch_of(data))
        if place == 1:
            mark_turned(out)
        return place > 1
    doubtful = False
    for data in tensors:
        if is_turned(data):
            for t in tensors_of(out):
                if _has_batch_second(func, t, data):
                    mark_turned(t)
                    doubtful |= t.ndim != data.ndim and data.shape[0] == data.shape[1]
    return doubtful


def _has_batch_second(func: Any, t: Tensor, data: Tensor) -> bool:
    """Whether the second dimension of what was made of turned data is the batch still, by its size."""
    if t.ndim < 2:
        return False
    if t.ndim == data.ndim and func not in RESHAPES:
        return t.shape[1] == data.shape[1]
    return t.shape[:2] == data.shape[:2]


def _order(func: Any, dims: int, args: Any, kwargs: Any) -> list[int]:
    """Which dimension of its argument each dimension of a transpose is."""
    if func is Tensor.transpose and len(args) == 3 and isinstance(args[1], int) and isinstance(args[2], int):
        order, (first, second) = list(range(dims)), (args[1] % dims, args[2] % dims)
        order[first], order[second] = second, first
        return order
    sizes = torch.empty(tuple(range(dims)), device="meta")  # sizes that name the dimensions
    out: Tensor = func(*map_tensors(lambda _: sizes, args), **map_tensors(lambda _: sizes, kwargs))
    return list(out.shape)
