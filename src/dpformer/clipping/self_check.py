"""The engine's self-check: randomised tests that what it computes is what plain autograd computes.

**Gradients**: those of all users, in random proportions, against plain autograd on the same graph.

For random weights w, a backward pass from Σ_b w_b·loss_b brings to every recorded call the gradient that these losses
send there, and plain autograd turns it into gradients of the parameters, function by function, without any idea of rows
or users: it is Σ_b w_b·∇loss_b, whatever the model does. The engine says Σ_b w_b·g_b. If one row were given to the
wrong user, or the loss of one user depended on rows of another, the two would differ, except for weights of probability
zero. Weights are in proportion to the clip factors, so what is compared is what is released, in units of C, and a user
with a small gradient counts as much as any. The norms of some users are compared with the lengths of their gradients.

The two may differ by rounding, and by no more: in float32 by 2·10⁻⁵ of the length of the whole. Where they differ by
more, the size of rounding is measured, by autograd with the weights times 1.37 and the result divided by it; 16 times
that passes, up to 2·10⁻³, for models whose gradients are small differences of large numbers. The precision is the
coarsest on the way from the losses to the parameters; float64 throughout passes up to 10⁻⁸, half precision up to
5·10⁻³, and up to 5·10⁻² if its rounding is that large.

**Losses** and gradients of users alone: where the loss is a function that can be called again, some users are computed
together by the engine, and each of them alone by plain autograd, outside of everything that the engine intercepts, with
random numbers that are the same for all users (isolation.py). So a value that Python carries from one user to another
is found by what it does to the losses, and so is a model that computes something else inside the engine than outside.

Both run on the first batches, until 16 users were seen, and at random later. The choice is made after the forward pass,
with random numbers of the operating system: no model can know it, and no seeded run is changed by it. A batch with a
user who is not finite shows nothing, and the next one is looked at.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.parameter_norms import ParameterUses
from dpformer.clipping.recording import RecordedCall, is_begin, leaves
from dpformer.clipping.rounding import full_precision
from dpformer.compat import BackwardCFunction
from dpformer.errors import UnsupportedUse

EVERY = 128  # batches from one random check to the next, on average: each costs about as much as a batch
PATIENCE = 16  # batches in a row that show nothing
# Relative errors that pass: at once; and at most, if rounding is seen to be of that size (half precision: the default).
_AT_ONCE, _AT_ONCE_IN_HALF = {torch.float64: 1e-8, torch.float32: 2e-5}, 5e-3
_AT_MOST, _AT_MOST_IN_HALF = {torch.float64: 1e-8, torch.float32: 2e-3}, 5e-2
_ROUNDINGS = 16  # times the rounding seen: the engine rounds elsewhere than autograd
_SCALE = 1.3717  # of weights whose gradients, divided by it again, differ by rounding alone
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32}
_WHY = (
    "a rule of the engine is wrong for this model, or a function of the model has a wrong derivative: report it with "
    "the model"
)


def due() -> bool:
    """Whether to check a batch that nothing else asks for."""
    return random.SystemRandom().randrange(EVERY) == 0


def compare_with_autograd(
    losses: Tensor,
    norms: Tensor,
    factors: Tensor,
    calls: Sequence[RecordedCall],
    groups: Sequence[ParameterUses],
    sink: list[Callable[[RecordedCall, Tensor], None]],
) -> bool:
    """Raises if users' gradients disagree with autograd. The graph of `losses` must still be there.

    False if nothing could be compared: beside a user who is not finite, autograd has no finite gradients.
    """
    if not bool((torch.isfinite(norms) & torch.isfinite(losses)).all()):
        return False
    types = _precisions(losses, calls)
    at_once = max(_AT_ONCE.get(dtype, _AT_ONCE_IN_HALF) for dtype in types)
    at_most = max(_AT_MOST.get(dtype, _AT_MOST_IN_HALF) for dtype in types)
    weights = (factors * _signs(len(losses)).to(factors)).to(losses.dtype)
    truth = _autograd(weights, losses, calls, sink)
    with full_precision(norms.device.type):  # what the engine adds up
        error = _distance(truth, groups, weights.to(norms.dtype))
    length = sum(_squared(g) for g in truth.values()) ** 0.5
    scale = max(length, float(torch.linalg.vector_norm(weights.to(norms.dtype) * norms)), 1e-12)
    if at_once * scale < error <= at_most * scale:
        scaled = _autograd(weights * _SCALE, losses, calls, sink)
        rounding = sum(_squared(g - scaled[key] / _SCALE) for key, g in truth.items()) ** 0.5
        at_once = max(at_once, _ROUNDINGS * rounding / scale)
    if not error <= min(at_once, at_most) * scale:
        raise UnsupportedUse(
            f"the sum of {len(losses)} users' gradients in random proportions disagrees with autograd (distance "
            f"{error:.3g} of {scale:.3g}): {_WHY}"
        )
    with full_precision(norms.device.type):
        _compare_norms(norms, groups, at_most)
    return True


def _distance(truth: dict[int, Tensor], groups: Sequence[ParameterUses], weights: Tensor) -> float:
    """‖Σ_b w_b·g_b of the engine − that of autograd‖ over all parameters."""
    missing, squared = dict(truth), 0.0
    for group in groups:
        ours = group.weighted_sum(weights)
        theirs = missing.pop(id(group.parameter), None)
        squared += _squared(ours if theirs is None else ours - theirs)
    return (squared + sum(_squared(g) for g in missing.values())) ** 0.5


def _precisions(losses: Tensor, calls: Sequence[RecordedCall]) -> set[torch.dtype]:
    """Types of all gradients on the way from the losses back to the calls, and through expressions to parameters.

    A model in float64 may compute its norms and rotations in float32, as Llama and T5 do: then the gradients of two
    backward passes are rounded there, whatever the types at the calls.
    """
    found = {torch.float64} | {call.grad.dtype for call in calls if call.grad is not None}
    for node in _nodes([losses.grad_fn, *(managed.grad_fn for call in calls for managed in call.managed)]):
        found.update(given.dtype for given in node._input_metadata)
    return {_REAL.get(dtype, dtype) for dtype in found}


def _nodes(stack: list[Any]) -> Iterator[Any]:
    """Of the graph behind these, but for leaves, which compute nothing."""
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        yield node
        stack += [after for after, _ in node.next_functions]


def _signs(users: int) -> Tensor:
    """(B,) random weights, ±1/2 … ±3/2; of a generator of its own, for the global one belongs to the model."""
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    sizes = torch.rand(users, generator=generator, dtype=torch.float64) + 0.5
    return torch.where(torch.rand(users, generator=generator) < 0.5, -sizes, sizes)


def _autograd(
    weights: Tensor, losses: Tensor, calls: Sequence[RecordedCall], sink: list[Callable[[RecordedCall, Tensor], None]]
) -> dict[int, Tensor]:
    """Σ_b w_b·∇loss_b by plain autograd, for each parameter by its identity."""
    truth: dict[int, Tensor] = {}
    known = set(map(id, calls))
    late: list[tuple[RecordedCall, Tensor]] = []  # expressions of parameters: their graph is used by both passes

    def receive(call: RecordedCall, grad: Tensor) -> None:
        if id(call) not in known:
            return
        if any(managed.grad_fn is not None for managed in call.managed):
            late.append((call, grad))
        else:
            _add_gradients(truth, call, grad)  # at once: the gradients of all calls take as much memory as the graph

    outside = [(leaf, leaf.grad) for leaf in leaves(losses)]  # inputs whose gradient is asked for: not the self-check's
    for leaf, _ in outside:
        leaf.grad = None
    sink.append(receive)
    try:
        torch.autograd.backward(losses, weights, retain_graph=True)
    finally:
        sink.pop()
        for leaf, gradient in outside:
            leaf.grad = gradient
    for call, grad in late:
        _add_gradients(truth, call, grad)
    return truth


def _compare_norms(norms: Tensor, groups: Sequence[ParameterUses], tolerance: float) -> None:
    """The norm of the largest user and of another one: the length of what the engine would add for them."""
    for user in {int(norms.argmax()), secrets.randbelow(len(norms))}:
        one = torch.zeros_like(norms)
        one[user] = 1
        length = sum(_squared(group.weighted_sum(one)) for group in groups) ** 0.5
        if not abs(float(norms[user]) - length) <= tolerance * max(length, 1e-12):
            raise UnsupportedUse(
                f"the gradient of user {user} disagrees with autograd (norm {float(norms[user]):.6g}, length "
                f"{length:.6g}): {_WHY}"
            )


def free_graph(losses: Tensor) -> None:
    """Frees what the graph has saved, as a usual backward pass does; else it would be kept as long as the losses.

    Functions of the model's own would be called with zeros, and may count: then it goes with the losses.
    """
    if any(isinstance(node, BackwardCFunction) and not is_begin(node) for node in _nodes([losses.grad_fn])):
        return
    try:
        torch.autograd.backward(_Nothing.apply(losses))
    except Exception:  # a hook that was put on later, and does not expect None
        return


class _Nothing(torch.autograd.Function):
    """Sends no gradient back, so that the backward pass computes nothing on its way."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        return losses.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def _squared(t: Tensor) -> float:
    """‖t‖², summed in float64; tables can be large, so they are not copied."""
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2


def _add_gradients(truth: dict[int, Tensor], call: RecordedCall, grad: Tensor) -> None:
    """Adds what the gradient at a call means for its parameters, by autograd alone."""
    with torch.enable_grad():
        fresh = [m.detach().requires_grad_() for m in call.managed]
        value = call.paired(grad, *fresh)
    if not value.requires_grad:  # nobody's loss came this way
        return
    grads = torch.autograd.grad(value, fresh, allow_unused=True)
    for managed, g in zip(call.managed, grads, strict=True):
        if g is None:
            continue
        if managed.grad_fn is None:
            truth[id(managed)] = truth.get(id(managed), 0) + g
            continue
        parameters = leaves(managed)
        pulled = torch.autograd.grad(managed, parameters, g, retain_graph=True, allow_unused=True)
        for parameter, p in zip(parameters, pulled, strict=True):
            if p is not None:
                truth[id(parameter)] = truth.get(id(parameter), 0) + p
