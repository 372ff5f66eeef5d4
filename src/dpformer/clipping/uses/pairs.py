"""Inner products of two uses of one parameter, without writing either gradient out: one function a pair of kinds.

A pair that is not in the table `PAIRS` has no closed form: then the gradients are written out (cost.py says so).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.uses.kinds import Dense, Lookup, Outer, Ragged
from dpformer.kernels.products import can_multiply, gram_squares

Use = Outer | Ragged | Lookup | Dense
BLOCK = 1 << 10  # numbers of a row that are converted and multiplied at once,
AT_ONCE = 1 << 17  # and of all rows: they stay in the cache


def inner(one: Use, other: Use) -> Tensor:
    """⟨g_b, g'_b⟩ of two uses for each user, shape (B,)."""
    pair = PAIRS.get((type(one), type(other)))
    if pair is not None:
        return pair(one, other)
    return PAIRS[type(other), type(one)](other, one)


def squared(use: Use) -> Tensor:
    """(B,) ‖g_b‖² without writing g_b out."""
    return SQUARED[type(use)](use)


# -- pairs ------------------------------------------------------------------------------------------------------------


def outer_outer(one: Outer, other: Outer) -> Tensor:
    """Σ_{t,u} ⟨left_t, left'_u⟩ ⟨right_t, right'_u⟩."""
    return products(one.left, other.left).mul_(products(one.right, other.right)).sum((1, 2))


def products(one: Tensor, other: Tensor) -> Tensor:
    """(B, T, n), (B, U, n) → (B, T, U): inner products of all rows in `wide` precision, some numbers at a time.

    In float32 they would round otherwise when rows are padded to another length, and rows that cancel make that large.
    """
    some = max(1, AT_ONCE // max(1, one.shape[1] * min(BLOCK, one.shape[2])))  # users
    if some >= len(one):
        return _products(one, other)
    if other is one:
        return torch.cat([_products(part, part) for part in one.split(some)])
    return torch.cat([_products(a, b) for a, b in zip(one.split(some), other.split(some), strict=True)])


def _products(one: Tensor, other: Tensor) -> Tensor:
    dtype = torch.promote_types(one.dtype, wide(one.device))
    total = one.new_zeros((), dtype=dtype)
    for a, b in zip(one.split(BLOCK, -1), other.split(BLOCK, -1), strict=True):
        left = a.to(dtype)
        right = (left if other is one else b.to(dtype)).mT
        total = total.baddbmm_(left, right) if total.ndim else torch.bmm(left, right)
    return total


def wide(device: torch.device) -> torch.dtype:
    """The precision in which norms are added up: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def outer_lookup(outer: Outer, lookup: Lookup) -> Tensor:
    """Σ_{t,u} left_u[id_t] ⟨grad_t, right_u⟩: the cross term of a tied embedding."""
    users, _, width = outer.left.shape
    if width != lookup.shape[0]:  # the table was reshaped between the two uses: only the dense form is common
        dtype = torch.promote_types(outer.left.dtype, wide(outer.left.device))
        written = Outer(outer.left.to(dtype), outer.right.to(dtype), outer.shape).dense()
        return Lookup(lookup.ids, lookup.grad.to(dtype), lookup.shape).dense().mul_(written).flatten(1).sum(1)
    index = lookup.ids[:, None, :].expand(users, outer.left.shape[1], lookup.ids.shape[1])
    return products(outer.right, lookup.grad).mul_(outer.left.gather(2, index)).sum((1, 2))


def ragged_other(ragged: Ragged, other: Outer | Lookup) -> Tensor:
    """Stretch by stretch of users with equal numbers of rows."""
    parts = (inner(Outer(left, right, ragged.shape), other.part(a, b)) for a, b, left, right in ragged.blocks())
    return torch.cat(list(parts))


PAIRS: dict[tuple[type, type], Callable[[Any, Any], Tensor]] = {
    (Outer, Outer): outer_outer,
    (Outer, Lookup): outer_lookup,
    (Ragged, Outer): ragged_other,
    (Ragged, Lookup): ragged_other,
}

# -- a use with itself ------------------------------------------------------------------------------------------------


def outer_squared(use: Outer) -> Tensor:
    """Ghost norm (Goodfellow 2015; Li et al. 2022)."""
    return gram_squares(use.left, use.right) if can_multiply(use.left, use.right) else outer_outer(use, use)


def ragged_squared(use: Ragged) -> Tensor:
    return torch.cat([outer_squared(Outer(left, right, use.shape)) for _, _, left, right in use.blocks()])


def lookup_squared(use: Lookup) -> Tensor:
    """Σ_{t,u} 1[id_t = id_u] ⟨grad_t, grad_u⟩, by summing the rows that read the same entry first."""
    if use.is_plain:
        return use.squares()
    users, length = use.ids.shape
    ids, order = use.ids.sort(dim=1)
    begins = torch.ones_like(ids)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    entry = begins.cumsum(1) - 1  # of each user, counted from zero; no shape depends on how many there are
    place = entry + length * torch.arange(users, device=ids.device)[:, None]
    grads = use.grad.take_along_dim(order[..., None], 1).flatten(0, 1)
    sums = torch.zeros_like(grads).index_add_(0, place.flatten(), grads)
    return sums.to(torch.promote_types(sums.dtype, wide(sums.device))).square_().view(users, -1).sum(1)


SQUARED: dict[type, Callable[[Any], Tensor]] = {
    Outer: outer_squared,
    Ragged: ragged_squared,
    Lookup: lookup_squared,
}
