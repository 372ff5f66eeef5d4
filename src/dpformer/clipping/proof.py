"""The engine proves itself: norms and gradients of a few users against plain autograd, in the same graph.

For one user b, a backward pass from loss b alone brings to every tap the gradient that this loss sends there, and
plain autograd turns it into gradients of the parameters, function by function, without any idea of rows or users. If
the engine gives the user the same norm and the same gradient, its rules are right, its rows belong to whom it thinks,
and the loss of the user does not depend on rows of others. The proof runs on the first batch and again whenever a
layout appears that was not seen before (a size that happens to equal the number of users, say); a batch with a user who
is not finite proves nothing, and the next one is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.gate import leaves
from dpformer.clipping.norms import ParameterUses
from dpformer.clipping.tap import Tap

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}  # half precision: 5e-2


def prove(
    losses: Tensor,
    norms: Tensor,
    taps: Sequence[Tap],
    groups: Sequence[ParameterUses],
    sink: list[Callable[[Tap, Tensor], None]],
    users: int,
) -> bool:
    """Raises if a few users' gradients disagree with autograd. The graph of `losses` must still be there.

    False if nothing could be compared: beside a user who is not finite, autograd has no finite gradients.
    """
    finite = torch.isfinite(norms) & torch.isfinite(losses)
    order = torch.argsort(torch.where(finite, norms, -1), descending=True)[:users]
    agree = [_agrees(user, losses, norms, taps, groups, sink) for user in order.tolist() if bool(finite[user])]
    return any(agree)


def _agrees(
    user: int,
    losses: Tensor,
    norms: Tensor,
    taps: Sequence[Tap],
    groups: Sequence[ParameterUses],
    sink: list[Callable[[Tap, Tensor], None]],
) -> bool:
    arrived: dict[int, Tensor] = {}
    sink.append(lambda tap, grad: arrived.__setitem__(id(tap), grad))
    try:
        torch.autograd.backward(losses[user], retain_graph=True)
    finally:
        sink.pop()
    truth = autograd_gradients(taps, arrived)
    one = torch.zeros_like(norms)
    one[user] = 1
    length = sum(_squared(g) for g in truth.values()) ** 0.5
    error = 0.0
    for group in groups:
        ours = group.weighted_sum(one)
        theirs = truth.pop(id(group.parameter), None)
        error += _squared(ours if theirs is None else ours - theirs)
    error += sum(_squared(g) for g in truth.values())
    tolerance = max(_TOLERANCE.get(tap.grad.dtype, 5e-2) for tap in taps if tap.grad is not None)
    off = max(error**0.5, abs(float(norms[user]) - length))
    if off > tolerance * max(length, 1e-12):
        raise UnsupportedUse(
            f"the gradient of user {user} disagrees with autograd (norm {float(norms[user]):.6g}, autograd "
            f"{length:.6g}, distance {error**0.5:.3g}): the loss of a user must depend on its own rows only, "
            f"and the first dimension must be the batch in every layer; check for time-first layouts, for position ids "
            f"made outside the forward pass, and for anything that mixes users"
        )
    return math.isfinite(off)


def _squared(t: Tensor) -> float:
    """‖t‖², summed in float64; tables can be large, so they are not copied."""
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2


def autograd_gradients(taps: Sequence[Tap], arrived: dict[int, Tensor]) -> dict[int, Tensor]:
    """Gradients of the parameters from the gradients at the taps, by autograd alone."""
    out: dict[int, Tensor] = {}
    for tap in taps:
        grad = arrived.get(id(tap))
        if grad is None:
            continue
        with torch.enable_grad():
            fresh = [m.detach().requires_grad_() for m in tap.managed]
            value = tap.paired(grad, *fresh)
        grads = torch.autograd.grad(value, fresh, allow_unused=True)
        for managed, g in zip(tap.managed, grads, strict=True):
            if g is None:
                continue
            if managed.grad_fn is None:
                out[id(managed)] = out.get(id(managed), 0) + g
                continue
            parameters = leaves(managed)
            pulled = torch.autograd.grad(managed, parameters, g, retain_graph=True, allow_unused=True)
            for parameter, p in zip(parameters, pulled, strict=True):
                if p is not None:
                    out[id(parameter)] = out.get(id(parameter), 0) + p
    return out
