"""Parameters that are added, multiplied or otherwise broadcast over users: positions, biases, scales, class tokens.

The parameter is copied to every row (a view, no memory), and the function runs on the copy. What flows back to row n
of the copy is what row n contributed: ∂/∂p of user b is the sum over the rows of b. This is exact for every
elementwise function and for concatenation, because such functions never let two rows meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.gate import ELEMENTWISE, Gate
from dpformer.clipping.recorded_call import paired
from dpformer.clipping.rules.registry import rule
from dpformer.clipping.trees import tensors_of
from dpformer.clipping.user_rows import UserRows
from dpformer.clipping.uses import Dense


@dataclass
class Blocks:
    """A tensor whose first dimension already counts the rows: each user got its own rows of it.

    Such a tensor is an expression, like `positions(arange(T)).expand(B, T, d)`; the gradient of user b is zero outside
    the rows of b.
    """

    grad: Tensor  # (rows, …)
    user: Tensor  # (rows,)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.grad.shape)

    @property
    def numbers_each(self) -> int:
        return self.grad.numel()

    def part(self, a: int, b: int) -> Dense:
        ours = ((self.user >= a) & (self.user < b)).nonzero()[:, 0]
        out = self.grad.new_zeros(b - a, *self.grad.shape)
        out[self.user[ours] - a, ours] = self.grad[ours]
        return Dense(out)

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        out += self.grad * c[self.user].reshape(-1, *[1] * (self.grad.ndim - 1))

    def keep(self, users: Tensor) -> None:
        self.grad = self.grad.masked_fill(~users[self.user].reshape(-1, *[1] * (self.grad.ndim - 1)), 0)


def per_row(gate: Gate, func: Any, parameter: Tensor, shape: Sequence[int], data: Tensor) -> Tensor:
    """A copy of the parameter for every row of a result of this shape, whose use is recorded."""
    if not shape or data.ndim != len(shape) or data.shape[0] != shape[0]:
        raise gate.refusal(parameter, func, "give it a tensor of users' data whose first dimension is the batch")
    padded = parameter.detach().reshape(*[1] * (len(shape) - parameter.ndim), *parameter.shape)
    if padded.shape[0] == shape[0] != 1:

        def blocks(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
            return [(parameter, Blocks(grad, rows.user_of_row(grad.shape[0], grad.device)))]

        return gate.record(func, [parameter], paired(lambda p: p), blocks, parameter.detach().clone(), rows=data)
    target = (shape[0], *padded.shape[1:])

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        return [(parameter, Dense(rows.total(grad).reshape(rows.users, *parameter.shape)))]

    def copies(p: Tensor) -> Tensor:
        return p.reshape(padded.shape).expand(target)

    return gate.record(func, [parameter], paired(copies), build, padded.expand(target), rows=data, inside=True)


def _all(names: str) -> set[Any]:
    return {getattr(home, name) for home in (torch, Tensor) for name in names.split() if hasattr(home, name)}


_IN_PLACE = _all("add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__")
_ELEMENTWISE = _IN_PLACE | _all(
    "add sub subtract mul multiply div divide true_divide rsub pow maximum minimum where lerp addcmul addcdiv "
    "masked_fill float_power __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ "
    "__rpow__"
)


ELEMENTWISE |= _ELEMENTWISE


@rule(*_ELEMENTWISE, takes_complex=True)
def elementwise(gate: Gate, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Any function that broadcasts its arguments and works number by number: copies go where parameters were."""
    tensors = tensors_of(args, kwargs)
    if (func in _IN_PLACE and gate.is_managed(args[0])) or "out" in kwargs:
        raise gate.refusal(next(t for t in tensors if gate.is_managed(t)), func, "build a new tensor instead")
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    data = max((t for t in tensors if not gate.is_public(t)), key=lambda t: t.ndim)

    def copy(value: Any) -> Any:
        return per_row(gate, func, value, shape, data) if gate.is_managed(value) else value

    return func(*map(copy, args), **{name: copy(value) for name, value in kwargs.items()})


@rule(torch.cat, torch.concat, torch.concatenate, torch.stack, takes_complex=True)
def joined(gate: Gate, func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """cat and stack along a dimension that is not the batch: each part must already have a row for every row."""
    tensors = [t for t in tensors if t.ndim != 1 or len(t)]  # torch.cat takes an empty one for nothing
    parameter = next(t for t in tensors if gate.is_managed(t))
    data = next((t for t in tensors if not gate.is_public(t)), None)
    if data is None:
        with gate:
            return func(tensors, dim)
    stacking = func is torch.stack
    if (dim if dim >= 0 else dim + data.ndim + stacking) == 0:
        raise gate.refusal(parameter, func, "join along a dimension other than the batch")

    def copy(t: Tensor) -> Tensor:
        if not gate.is_managed(t):
            return t
        if t.shape[0] != data.shape[0]:
            raise gate.refusal(t, func, "expand the parameter to the batch first")
        return per_row(gate, func, t, (data.shape[0], *t.shape[1:]), data)

    return func([copy(t) for t in tensors], dim)
