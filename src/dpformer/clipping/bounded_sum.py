"""Which gradients are sums of bounded users: the mark that the engine leaves and the optimizer asks for.

A `p.grad` that the engine made is Σ_u c_u·g_u with ‖c_u·g_u‖ ≤ C over all parameters together. Nothing in the numbers
tells it from one that `loss.backward()` made, so the engine leaves a mark on it, bound to this very tensor and to what
it holds: replaced, added to or scaled, it has lost its mark, and a private step on it is refused. Contents are compared
too, by the sum of their bits, since `p.grad.data.mul_(100)` leaves no other trace. It is a guard against mistakes: who
wants to can forge it.

The mark also says *whose* losses the sum holds: one `Addend` per backward pass. A user who is in a sum twice counts 2C
there, so a second time is refused, whichever micro-batch, engine or process adds it. Users of two batches in one sum
would be two Poisson samples priced as one, so they are refused too. And a step that claims to be of a batch must hold
all of it: if who is left out depends on who else was drawn, one user changes more than its own summand. Without a part
nobody knows whose losses they are: then that each user counts once is assumed, and the step is accounted for without
amplification.

For a parameter in half precision the mark also holds the sum itself, in float32: in bfloat16, which has eight bits, the
600th user of a sum would hardly change it, and another one would change it by more than C.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dpformer import compat
from dpformer.kernels.checksum import Bits, bits_and_finite, bits_of_all, equal
from dpformer.kernels.products import add_sums, can_weigh
from dpformer.sampling.batch import Batch, Part

# -- whose losses a sum holds ------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Addend:
    """One backward pass: the users whose clipped gradients it added; None: not told."""

    part: Part | None
    self_checked: bool = True  # whether the engine that made it compares itself with autograd


Addends = tuple[Addend, ...]


def refuse_repeated(held: Sequence[Addend], part: Part | None) -> None:
    """Raises if these users must not be added to a sum: they are in it already, or it is of another batch.

    Args:
        held: what the sum holds.
        part: the users to add; None: not told.
    """
    for addend in held:
        _refuse_mixed(addend.part, part)
    if part is not None:
        _refuse_twice([*(addend.part.users for addend in held if addend.part is not None), part.users], part.batch)


def check_users(held: Sequence[Addend], batch: Batch | None) -> None:
    """Raises unless a sum holds every user of a batch once, and nobody else.

    Args:
        held: what the sum holds.
        batch: the one to step on; None: a step of users that nobody names.
    """
    if batch is None:
        for addend in held:
            if addend.part is not None:
                raise ValueError(
                    f"the gradients hold users of the batch of step {addend.part.batch.step + 1}: give it to the step, "
                    "`optimizer.step(batch)`"
                )
        return
    for addend in held:
        _refuse_mixed(batch[:0], addend.part)
    users = [addend.part.users for addend in held if addend.part is not None]
    _refuse_twice(users, batch)
    if (count := sum(map(len, users))) != len(batch):
        raise ValueError(
            f"the batch of step {batch.step + 1} has {len(batch)} users, and the gradients hold {count} of them: add "
            "all of them, those without data with a loss of zero, or who is left out depends on who else was drawn"
        )


def _refuse_mixed(held: Part | None, part: Part | None) -> None:
    """A sum is of one batch, or of users that nobody names."""
    if held is None and part is None:
        return
    if held is None or part is None:
        raise ValueError(
            "this sum holds users of a batch, and losses whose users are not named: give the part of the batch to "
            "every backward pass of a step or to none, and call `zero_grad()` after each step"
        )
    if not held.batch.is_of_the_draw(part.batch):
        raise ValueError(
            f"this sum holds users of the batch of step {held.batch.step + 1}, and now users of the batch of step "
            f"{part.batch.step + 1} come: each batch is one step, so batches cannot be accumulated; call "
            "`optimizer.step(batch)` and `zero_grad()` before the next one; for larger batches raise the sample rate"
        )


def _refuse_twice(users: Sequence[Tensor], batch: Batch) -> None:
    if not users:
        return
    ordered = torch.cat(list(users)).sort().values
    if bool((twice := ordered[1:] == ordered[:-1]).any()):
        raise ValueError(
            f"user {int(ordered[1:][twice][0])} is in the sum of step {batch.step + 1} already: a user counts once in "
            "a step, or would be released at a multiple of the clip norm; put all of a user's data into one loss"
        )


# -- what the engine promises of a gradient ----------------------------------------------------------------------------


_MARK = "_phantom_bound"
_adding = threading.Lock()  # two threads may add to one gradient
_HALF = (torch.bfloat16, torch.float16)


@dataclass(slots=True)  # one for each parameter in every step: frozen ones take three times as long to make
class Bound:
    """What the engine promises of one gradient."""

    clip_norm: float  # C: what one user can change, over all the parameters in `together`
    together: frozenset[int] | None  # identities of the parameters clipped as one; None: not always the same ones
    gradient: weakref.ref[Tensor]
    version: int
    bits: Bits
    wide: Tensor | None  # the sum itself, where `p.grad` has too few digits for it
    finite: bool  # whether it was seen to be
    addends: Addends  # all that the sum holds, whichever parameter they reached

    def is_about(self, gradient: Tensor) -> bool:
        """Whether it speaks of this gradient, which nobody has openly changed since; its bits may tell otherwise."""
        return self.gradient() is gradient and self.version == gradient._version

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of the gradient, in a file or in another process, is not the gradient


def _nothing() -> None:
    return None


def bound_of(parameter: Tensor) -> Bound | None:
    """The promise on `p.grad`; None where there is none, or it was changed since."""
    return bounds_of([parameter])[0]


def bounds_of(parameters: Sequence[Tensor]) -> list[Bound | None]:
    """The same for each of many parameters."""
    told: list[tuple[int, Bound, Tensor]] = []
    for n, parameter in enumerate(parameters):
        gradient = parameter.grad
        mark: Bound | None = getattr(gradient, _MARK, None)
        if gradient is not None and mark is not None and mark.is_about(gradient):
            told.append((n, mark, gradient))
    found: list[Bound | None] = [None] * len(parameters)
    same = equal([mark.bits for _, mark, _ in told], bits_of_all([gradient for _, _, gradient in told]))
    for (n, mark, _), is_same in zip(told, same, strict=True):
        found[n] = mark if is_same else None
    return found


def sum_of(parameter: Tensor) -> Tensor | None:
    """The sum of the users' gradients, in as many digits as it was made."""
    if parameter.dtype not in _HALF:  # the gradient has them all
        return parameter.grad
    mark = bound_of(parameter)
    return parameter.grad if mark is None or mark.wide is None else mark.wide


def joint_bound(parameters: Sequence[Tensor], marks: Sequence[Bound | None] | None = None) -> float:
    """C of the gradients of these parameters together; 0 if they are all None or zero.

    Raises ValueError if one of them is not a sum of bounded users, or one that was clipped with them is left out.

    Args:
        marks: `bounds_of` these parameters, if they are known already.
    """
    bound, together = 0.0, None
    for parameter, mark in zip(parameters, bounds_of(parameters) if marks is None else marks, strict=True):
        if parameter.grad is None:
            continue
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
    if together is not None and not together <= set(map(id, parameters)):
        raise ValueError(
            "PhantomClipping bounds parameters that this optimizer does not have, so their gradients would get no "
            "noise: give all of them to one PrivateOptimizer, or freeze the others, requires_grad_(False), before "
            "creating PhantomClipping"
        )
    return bound


def addends_of(parameters: Sequence[Tensor], marks: Sequence[Bound | None] | None = None) -> Addends:
    """Whose losses the gradients of these parameters hold, each backward pass once.

    Args:
        marks: `bounds_of` these parameters, if they are known already.
    """
    held = {id(m.addends): m.addends for m in (bounds_of(parameters) if marks is None else marks) if m is not None}
    if len(held) == 1:  # nearly always: parameters of one sum share the tuple
        return next(iter(held.values()))
    return tuple({id(addend): addend for addends in held.values() for addend in addends}.values())


@dataclass(slots=True)
class Addition:
    """A sum over users that is to be added to `p.grad`."""

    parameter: Tensor
    total: Tensor | Callable[[Tensor], None]  # the sum, or what adds it to a tensor
    dtype: torch.dtype  # that it is computed in
    written: Tensor | None = None  # (B, *shape) what the factors are multiplied with, where that is all

    def add(self, out: Tensor) -> None:
        if isinstance(self.total, Tensor):
            out += self.total
        else:
            self.total(out)


def add_bounded(
    additions: Sequence[Addition],
    factors: Tensor,
    clip_norm: float,
    together: frozenset[int] | None,
    *,
    part: Part | None = None,
    self_checked: bool = True,
) -> None:
    """`p.grad` += sums of users bounded by `clip_norm` over the parameters in `together`.

    What is there already must be such a sum too (or zero), else the whole is not and carries no mark. Nothing is added
    if a user is in the sum already, or the sum is of another batch.

    Args:
        factors: (B,) of the users.
        part: who they are; None: not told.
        self_checked: whether the engine that made the sums compares itself with autograd.
    """
    if part is not None and len(part) != len(factors):
        raise ValueError(f"the part has {len(part)} users, and there are losses of {len(factors)}: give one loss each")
    with _adding:
        _add_all(additions, factors, (clip_norm, together), part, self_checked)


def _add_all(
    additions: Sequence[Addition],
    factors: Tensor,
    bound: tuple[float, frozenset[int] | None],
    part: Part | None,
    self_checked: bool,
) -> None:
    clip_norm, together = bound
    parameters = [addition.parameter for addition in additions]
    before = bounds_of(parameters)
    held = addends_of(parameters, before)
    refuse_repeated(held, part)
    held = (*held, Addend(part, self_checked))
    known = [
        mark is not None or parameter.grad is None or _is_zero(parameter.grad)
        for parameter, mark in zip(parameters, before, strict=True)
    ]
    quick = _add_written(additions, factors)
    quick = _begin(additions, quick)
    wides = [
        None if is_added else _add(addition, mark)
        for addition, mark, is_added in zip(additions, before, quick, strict=True)
    ]
    marks = [
        (clip_norm, together)
        if mark is None
        else (max(clip_norm, mark.clip_norm), together if mark.together == together else None)
        for mark in before
    ]
    _mark(parameters, marks, wides, known, held)


def _add_written(additions: Sequence[Addition], factors: Tensor) -> list[bool]:
    """Adds what compiled code adds up, all at once; says of which additions it did."""
    sums: list[tuple[Tensor, Tensor, bool]] = []
    quick = [False] * len(additions)
    for n, addition in enumerate(additions):
        parameter, written = addition.parameter, addition.written
        if written is None or parameter.dtype is not factors.dtype:
            continue
        gradient = parameter.grad
        out = torch.empty_like(parameter, memory_format=torch.contiguous_format) if gradient is None else gradient
        if can_weigh(written, out):
            sums.append((written, out, gradient is not None))
            quick[n] = True
    if sums:
        add_sums(sums, factors)
    made = (out for _, out, _ in sums)
    for parameter in (addition.parameter for addition, is_added in zip(additions, quick, strict=True) if is_added):
        out = next(made)
        if parameter.grad is None:
            parameter.grad = out
    return quick


def _begin(additions: Sequence[Addition], added: Sequence[bool]) -> list[bool]:
    """`p.grad` ← sums that are there, and 0 where one is to be added to nothing: a call each for all.

    Says which additions are done.
    """
    begun = [
        (n, addition)
        for n, addition in enumerate(additions)
        if not added[n] and (p := addition.parameter).grad is None and p.dtype == addition.dtype not in _HALF
    ]
    copied: dict[int, tuple[Tensor, Tensor]] = {}
    zeros: list[Tensor] = []
    for n, addition in begun:
        p, total = addition.parameter, addition.total
        p.grad = torch.empty_like(p, memory_format=torch.contiguous_format)
        if isinstance(total, Tensor):
            copied[n] = p.grad, total
        else:
            zeros.append(p.grad)
    if copied:
        gradients, totals = zip(*copied.values(), strict=True)
        compat.copy_all(list(gradients), list(totals))
    if zeros:
        compat.zero_all(zeros)
    return [is_added or n in copied for n, is_added in enumerate(added)]


def _add(addition: Addition, before: Bound | None) -> Tensor | None:
    """Adds to `p.grad`; gives the sum in more digits, where `p.grad` has too few for it."""
    parameter, dtype = addition.parameter, addition.dtype
    if parameter.dtype in _HALF:
        wide = None if before is None else before.wide
        if wide is None:
            wide = torch.zeros_like(parameter, dtype=dtype) if parameter.grad is None else parameter.grad.to(dtype)
        addition.add(wide)
        _write(parameter, wide)
        return wide
    if parameter.dtype == dtype and parameter.grad is not None and parameter.grad.is_contiguous():
        addition.add(parameter.grad)
        return None
    total = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    addition.add(total)
    _write(parameter, total if parameter.grad is None else parameter.grad + total)
    return None


def put_bounded(
    parameters: Sequence[Tensor],
    sums: Sequence[Tensor | None],
    clip_norm: float,
    addends: Sequence[Addend] = (Addend(None),),
) -> None:
    """`p.grad` ← sums over users that were made elsewhere: in other micro-batches or other processes.

    Only for sums that were taken from `sum_of` of gradients whose `joint_bound` was at most `clip_norm`, and that hold
    the users of `addends`, each once: nothing is checked here.
    """
    together = frozenset(map(id, parameters))
    written: list[Tensor] = []
    wides: list[Tensor | None] = []
    for parameter, total in zip(parameters, sums, strict=True):
        if total is None:
            parameter.grad = None
            continue
        _write(parameter, total)
        written.append(parameter)
        wides.append(total.clone() if parameter.dtype in _HALF else None)
    _mark(written, [(clip_norm, together)] * len(written), wides, [True] * len(written), tuple(addends))


def _write(parameter: Tensor, total: Tensor) -> None:
    """`p.grad` ← total, in place where there is one: fresh memory costs more than the arithmetic."""
    if parameter.grad is None:
        parameter.grad = total.to(parameter.dtype, copy=True)
    else:
        parameter.grad.copy_(total)


def _mark(
    parameters: Sequence[Tensor],
    bounds: Sequence[tuple[float, frozenset[int] | None]],
    wides: Sequence[Tensor | None],
    known: Sequence[bool],
    addends: Addends,
) -> None:
    gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
    every, finite = bits_and_finite(gradients)
    for n, (gradient, bits) in enumerate(zip(gradients, every, strict=True)):
        reference, version = weakref.ref(gradient), gradient._version
        mark = Bound(*bounds[n], reference, version, bits, wides[n], finite, addends) if known[n] else None
        setattr(gradient, _MARK, mark)


def _is_zero(gradient: Tensor) -> bool:
    return gradient.layout == torch.strided and not bool(gradient.any())


def _refusal(parameter: Tensor) -> str:
    return (
        f"the gradient of a parameter of shape {tuple(parameter.shape)} is not a sum that PhantomClipping has bounded, "
        f"or was changed since: make it by `clipping.backward(losses, …)` alone, not by `loss.backward()` (as Trainer "
        f"and Accelerate do), do not scale, clip or replace it, call `zero_grad()` after each step, and give every "
        f"trained parameter to PhantomClipping (if you bound each user yourself: assume_clipped=True)"
    )
