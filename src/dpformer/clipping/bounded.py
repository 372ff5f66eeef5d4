"""Which gradients are sums of bounded users: the mark that the engine leaves and the optimizer asks for.

A `p.grad` that the engine made is Σ_u c_u·g_u with ‖c_u·g_u‖ ≤ C over all parameters together. Nothing in the numbers
tells it from one that `loss.backward()` made, so the engine leaves a mark on it, bound to this very tensor and to what
it holds: replaced, added to or scaled, it has lost its mark, and a private step on it is refused. Contents are compared
too, by the sum of their bits, since `p.grad.data.mul_(100)` leaves no other trace. It is a guard against mistakes: who
wants to can forge it.

For a parameter in half precision the mark also holds the sum itself, in float32: in bfloat16, which has eight bits, the
600th user of a sum would hardly change it, and another one would change it by more than C.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MARK = "_phantom_bound"
_HALF = (torch.bfloat16, torch.float16)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Bound:
    """What the engine promises of one gradient."""

    clip_norm: float  # C: what one user can change, over all the parameters in `together`
    together: frozenset[int] | None  # identities of the parameters clipped as one; None: not always the same ones
    gradient: weakref.ref[Tensor]
    version: int
    bits: Tensor  # () int64
    wide: Tensor | None  # the sum itself, where `p.grad` has too few digits for it

    def holds(self, gradient: Tensor) -> bool:
        """Whether it speaks of this gradient, and nothing was done to it since."""
        if self.gradient() is not gradient or self.version != gradient._version:
            return False
        return bool(self.bits == bits_of(gradient))

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of the gradient, in a file or in another process, is not the gradient


def _nothing() -> None:
    return None


def bound_of(parameter: Tensor) -> Bound | None:
    """The promise on `p.grad`; None where there is none, or it was changed since."""
    mark = getattr(parameter.grad, _MARK, None)
    return mark if mark is not None and mark.holds(parameter.grad) else None


def sum_of(parameter: Tensor) -> Tensor | None:
    """The sum of the users' gradients, in as many digits as it was made."""
    if parameter.dtype not in _HALF:  # the gradient has them all
        return parameter.grad
    mark = bound_of(parameter)
    return parameter.grad if mark is None or mark.wide is None else mark.wide


def joint_bound(parameters: Iterable[Tensor]) -> float:
    """C of the gradients of these parameters together; 0 if they are all None or zero.

    Raises ValueError if one of them is not a sum of bounded users.
    """
    bound, together = 0.0, None
    for parameter in parameters:
        if parameter.grad is None:
            continue
        mark = bound_of(parameter)
        if mark is None:
            if _is_zero(parameter.grad):
                continue
            raise ValueError(_refusal(parameter))
        if mark.together is None or (together is not None and mark.together != together):
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} was clipped apart from others: each "
                f"user's norm must be over all parameters together, so give them all to one PhantomClipping"
            )
        bound, together = max(bound, mark.clip_norm), mark.together
    return bound


def add_bounded(
    parameter: Tensor,
    add: Callable[[Tensor], None],
    dtype: torch.dtype,
    clip_norm: float,
    together: frozenset[int] | None,
) -> None:
    """`p.grad` += a sum of users bounded by `clip_norm` over the parameters in `together`; `add` adds it to a tensor.

    What is there already must be such a sum too (or zero), else the whole is not and carries no mark.
    """
    before = bound_of(parameter)
    known = before is not None or parameter.grad is None or _is_zero(parameter.grad)
    wide = None
    if parameter.dtype in _HALF:
        wide = None if before is None else before.wide
        if wide is None:
            wide = torch.zeros_like(parameter, dtype=dtype) if parameter.grad is None else parameter.grad.to(dtype)
        add(wide)
        _write(parameter, wide)
    elif parameter.dtype == dtype and (parameter.grad is None or parameter.grad.is_contiguous()):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        add(parameter.grad)
    else:
        total = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        add(total)
        _write(parameter, total if parameter.grad is None else parameter.grad + total)
    if before is not None:
        clip_norm = max(clip_norm, before.clip_norm)
        together = together if before.together == together else None
    _mark(parameter, clip_norm, together, wide, known)


def put_bounded(parameters: Sequence[Tensor], sums: Sequence[Tensor | None], clip_norm: float) -> None:
    """`p.grad` ← sums over users that were made elsewhere: in other micro-batches or other processes.

    Only for sums that were taken from `sum_of` of gradients whose `joint_bound` was at most `clip_norm`: nothing is
    checked here.
    """
    together = frozenset(map(id, parameters))
    for parameter, total in zip(parameters, sums, strict=True):
        if total is None:
            parameter.grad = None
            continue
        _write(parameter, total)
        wide = total.clone() if parameter.dtype in _HALF else None
        _mark(parameter, clip_norm, together, wide, known=True)


def _write(parameter: Tensor, total: Tensor) -> None:
    """`p.grad` ← total, in place where there is one: fresh memory costs more than the arithmetic."""
    if parameter.grad is None:
        parameter.grad = total.to(parameter.dtype, copy=True)
    else:
        parameter.grad.copy_(total)


def _mark(
    parameter: Tensor, clip_norm: float, together: frozenset[int] | None, wide: Tensor | None, known: bool
) -> None:
    gradient = parameter.grad
    assert gradient is not None
    mark = Bound(clip_norm, together, weakref.ref(gradient), gradient._version, bits_of(gradient), wide)
    setattr(gradient, _MARK, mark if known else None)


def bits_of(t: Tensor) -> Tensor:
    """() int64: the sum of the bits of a tensor, read as whole numbers, modulo 2⁶⁴."""
    t = t.detach()
    flat = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1)
    size = flat.element_size()
    whole = len(flat) - len(flat) % (8 // size)
    if flat.storage_offset() % (8 // size):
        whole = 0
    if whole == len(flat):
        return flat.view(torch.int64).sum()  # eight bytes at once: thirty times as quick
    long = flat[:whole].view(torch.int64).sum()
    return long + flat[whole:].view(_WORDS[size]).sum(dtype=torch.int64)


def _is_zero(gradient: Tensor) -> bool:
    return gradient.layout == torch.strided and not bool(gradient.any())


def _refusal(parameter: Tensor) -> str:
    return (
        f"the gradient of a parameter of shape {tuple(parameter.shape)} is not a sum that PhantomClipping has bounded, "
        f"or was changed since: make it by `clipping.backward(losses, …)` alone, not by `loss.backward()` (as Trainer "
        f"and Accelerate do), do not scale, clip or replace it, call `zero_grad()` after each step, and give every "
        f"trained parameter to PhantomClipping (if you bound each user yourself: assume_clipped=True)"
    )
