"""A recorded call: where a parameter was used, and the gradient that reached its output in the one backward pass.

The parameter itself is cut out of the graph (the function runs on `parameter.detach()`), so autograd never computes
its summed gradient: what each user contributes is computed from the recorded call instead, once, by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.user_rows import UserRows
from dpformer.clipping.uses import Use


class Source(Protocol):
    """What a recorded call tells of one parameter: the use itself, or what writes a use out for a few users."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def part(self, a: int, b: int) -> Use: ...
    def add_sum(self, c: Tensor, out: Tensor) -> None: ...
    def keep(self, users: Tensor) -> None: ...


Paired = Callable[..., Tensor]  # (gradient of the output, *parameters) → number
Build = Callable[[Tensor, UserRows], Sequence[tuple[Tensor, Source]]]

CHANGED = "a tensor that it read was changed in place afterwards: build a new tensor instead"
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def paired(function: Callable[..., Tensor]) -> Paired:
    """⟨function(parameters), gradient⟩: its derivative by a parameter is what the gradient contributes to it."""

    def product(grad: Tensor, *parameters: Tensor) -> Tensor:
        value = function(*parameters)
        return (value * grad.conj()).real.sum() if value.is_complex() else (value * grad).sum()

    return product


def own(out: Tensor) -> Tensor:
    """A view (einsum permutes a product) is copied: were the model to write into it, autograd would lead its gradient
    past the hook, to what it is a view of, and neither the engine nor the proof would know."""
    return out.clone() if out._is_view() else out


def fresh(out: Tensor) -> Tensor:
    """The same without a copy, for a result that is a view of what nobody else holds: F.linear of three dimensions."""
    if not out._is_view() or not out.is_contiguous() or out._base is None or out._base.numel() != out.numel():
        return own(out)
    whole: Tensor = _UNSAFE_VIEW(out, out.shape)
    return whole


@dataclass
class RecordedCall:
    """One call of a function with parameters among its arguments."""

    func: Any
    names: tuple[str, ...]  # of the parameters
    managed: list[Tensor]  # the parameters (or expressions of parameters) used here
    paired: Paired  # ⟨the function of `managed`, a gradient⟩: what plain autograd differentiates in the proof
    build: Build  # gradient of the output → uses, once the number of users is known
    shape: tuple[int, ...]  # of the tensor whose first dimension counts the rows
    sink: list[Callable[[RecordedCall, Tensor], None]]  # shared with the engine: the last one takes the gradients
    context: int  # which `clipping.users` it was recorded in, counted up
    grad: Tensor | None = field(default=None)

    @property
    def numbers(self) -> int:
        """That its uses hold, at most."""
        return prod(self.shape) + (0 if self.grad is None else self.grad.numel())

    def uses(self, users: int) -> Sequence[tuple[Tensor, Source]]:
        """What each parameter got here, resolved to users, in at least float32."""
        assert self.grad is not None
        dtype = torch.promote_types(self.grad.dtype, torch.float32)
        for managed in self.managed:  # a float64 parameter in a layer that computes in float32, say
            dtype = torch.promote_types(dtype, managed.real.dtype if managed.is_complex() else managed.dtype)
        grad = self.grad.to(dtype)
        return self.build(grad, UserRows(users))

    @property
    def where(self) -> str:
        """For messages."""
        return f"parameter '{self.names[0]}' in {getattr(self.func, '__name__', self.func)}"

    def _received(self, place: int, grads: Sequence[Tensor | None]) -> None:
        if (grad := grads[place]) is not None:
            self.receive(grad)

    def receive(self, grad: Tensor) -> None:
        if torch.is_grad_enabled():  # so it is inside a backward pass with create_graph=True only
            raise UnsupportedUse(
                f"{self.where} is differentiated with create_graph=True (a gradient penalty, a second derivative): the "
                f"parameter is cut out of the graph here, so its part in that gradient would be lost; leave "
                f"create_graph away, or compute the penalty without it"
            )
        if self.sink:
            self.sink[-1](self, grad)

    def forget(self) -> None:
        """Lets go of activations and gradients once the norms are known."""
        self.grad = None
        self.build = self.paired = _forgotten

    def watch(self, out: Tensor, token: Tensor) -> Tensor:
        """Returns `out`, whose gradient will be brought here; it must not be a view (`own`)."""
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(partial(self._received, out.output_nr))  # after hooks of the user's own
            return out
        return _Begin.apply(token, self, [out])


def _forgotten(*_: Any) -> Any:
    raise AssertionError("the norms of this call have been computed")


class _Begin(torch.autograd.Function):
    """Starts the graph at an output that nothing before it made differentiable (an embedding, the first layer)."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, call: RecordedCall, out: list[Tensor]) -> Tensor:
        ctx.call = call
        return out.pop()  # in a list, for a tensor argument returned as it came could not be changed in place later

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.call.receive(grads[0])
        return None, None, None


def is_begin(node: Any) -> bool:
    """Whether a node of the graph is such a start."""
    return getattr(type(node), "_forward_cls", None) is _Begin
