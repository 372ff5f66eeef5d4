"""Phantom Clipping: the clipped sum of per-user gradients in one backward pass, exact for any model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpformer.clipping.bounded import Addition, add_bounded
from dpformer.clipping.checkpointing import passed_over
from dpformer.clipping.clip_functions import ClipFunction
from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.gate import Gate
from dpformer.clipping.norms import ParameterUses
from dpformer.clipping.per_user_norms import PerUserNorms
from dpformer.clipping.picked import picked
from dpformer.clipping.proof import PATIENCE, due, let_go, prove
from dpformer.clipping.recorded_call import RecordedCall
from dpformer.clipping.registered import Walk
from dpformer.clipping.rounding import full_precision
from dpformer.clipping.rules import RULES, any_function
from dpformer.clipping.state import State
from dpformer.clipping.user_rows import Packed, UserRows
from dpformer.clipping.users import OneUserExists
from dpformer.sampling.batch import Part

ENOUGH = 16  # users of a layout that are proven before it counts: two may be in order by chance
# What is saved for the backward pass must be what was there: hooks may run layers again, without the gate.
_CHECKPOINTING = (
    "hooks on saved tensors (activation checkpointing other than torch.utils.checkpoint.checkpoint, offloading) are "
    "not supported: switch them off and make the micro-batches smaller instead"
)


class PhantomClipping:
    """Per-user clipping without per-user gradients, for any `nn.Module`.

        with clipping:                                  # uses of parameters are recorded in here
            losses = model(batch)                       # one loss a user, shape (B,)
        norms = clipping.backward(losses, normalize(1.0))

    `backward` adds Σ_i c_i g_i to `p.grad` of every trainable parameter, with g_i the gradient of user i's loss and
    c_i = clip(‖g_i‖) its factor; it returns the norms ‖g_i‖, over all trainable parameters together. It is a *sum* over
    users, never a mean, so any split of a batch into parts gives the same `p.grad`.

    A user whose loss or gradient is not finite contributes nothing and is counted in `skipped_users`.

    Args:
        model: the module whose trainable parameters are clipped.
        proof: compare the gradients of all users with plain autograd on the first batches (until 16 users were seen),
            on every new layout of rows and at random later (proof.py).
    """

    def __init__(
        self, model: nn.Module, *, proof: bool = True, fallback: Literal["one at a time", "error"] = "one at a time"
    ) -> None:
        refuse_distributed(model)
        if fallback not in ("one at a time", "error"):
            raise ValueError(f'fallback is {fallback!r}; give "one at a time" or "error"')
        self.model = model
        self.proof = proof
        self.skipped_users = 0
        self._gate = Gate(RULES, any_function)
        self._walk = Walk(model)
        self._gate.survey(self._walk())
        self._gate.remember_constants(model)
        self._users = OneUserExists(model, self._gate, fallback == "one at a time")
        self._proven: dict[object, int] = {}  # how many users, by layout
        self._enough = ENOUGH
        self._put_off = 0  # batches that needed a proof and could not be proven
        self._due = due  # processes that share a backward pass must agree on it
        self._state: State | None = None

    def __enter__(self) -> PhantomClipping:
        found = self._walk()
        self._gate.survey(found)
        self._state = State(found)
        self._no_hooks = torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTING)
        self._no_hooks.__enter__()
        self._checkpointing = passed_over()
        self._checkpointing.__enter__()
        self._gate.context += 1
        self._gate.written.clear()
        self._gate.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.__exit__(kind, error, trace)
        self._checkpointing.__exit__(None, None, None)
        self._no_hooks.__exit__(None, None, None)
        if kind is not None:
            self._gate.calls.clear()
        state, self._state = self._state, None
        if kind is None and state is not None:
            self._compare(state)
        if kind is RuntimeError and _CHECKPOINTING in str(error):
            raise UnsupportedUse(_CHECKPOINTING) from error

    def _compare(self, state: State) -> None:
        try:
            state.compare(self._walk(), self._gate.is_public)
        except UnsupportedUse:
            self._gate.calls.clear()
            raise

    @contextmanager
    def users(self, data: Any, part: Part | None = None) -> Iterator[Any]:
        """Inside, one user exists: gives the data of one user, with a leading dimension of 1.

        Args:
            data: a tensor whose first dimension counts the users, or a tuple, list, dict or dataclass of such tensors.
            part: the users of the batch whose data it is; without it the step claims no sampling.
        """
        with self._users.of(data, part, self._walk) as user:
            yield user

    def public(self, *things: Tensor | nn.Module) -> None:
        """Declares tensors or frozen modules (weights of classes, a teacher) the same for every user."""
        self._users.declare(*things)

    @property
    def fallbacks(self) -> dict[str, int]:
        """What was computed one user at a time, by name, and how often."""
        return dict(self._users.fallback.counts)

    def accumulate(
        self, loss_of: Callable[[Any], Tensor], data: Any, clip: ClipFunction, part: Part | None = None
    ) -> Tensor:
        """Adds the clipped sum of the gradients of loss_of(user) to `p.grad`; returns the norms, shape (B,).

        The same as `users` and `backward`; a loss that torch cannot compute for all users together is computed for one
        user at a time, by plain autograd.

        Args:
            loss_of: one user's data, with a leading dimension of 1 → the loss of that user, one number.
            data, part: as in `users`.
            clip: the factor of each user by its norm.
        """
        return self._users.accumulate(self, loss_of, data, clip, part)

    @contextmanager
    def packed(self, user_of_row: Tensor) -> Iterator[None]:
        """Inside, tensors with len(user_of_row) rows are packed: `user_of_row[n]` is the user of row n, from 0."""
        with torch._C.DisableTorchFunction():  # what is computed here is none of the model's
            before, self._gate.packed = self._gate.packed, Packed.of(user_of_row)
        try:
            yield
        finally:
            self._gate.packed = before

    def backward(self, losses: Tensor, clip: ClipFunction, *, part: Part | None = None) -> Tensor:
        """Adds the clipped sum of the users' gradients to `p.grad`; returns the norms before clipping, shape (B,).

        Several contexts may come first, then a backward pass for the losses of each, in the same order.

        Args:
            losses: (B,) one per user.
            clip: the factor of each user by its norm.
            part: the users of the batch that the losses are of; without it the step claims no sampling.
        """
        later: list[RecordedCall] = []
        together = self._users.losses(losses, part)
        if together is not None:
            losses, part = together
        try:
            norms, later = self._backward(losses, clip, part, together is not None)
            return norms
        finally:
            self._gate.calls[:] = later
            self._gate.doubts &= {call.context for call in later}

    def _backward(
        self, losses: Tensor, clip: ClipFunction, part: Part | None, together: bool = False
    ) -> tuple[Tensor, list[RecordedCall]]:
        """The norms, and the calls of contexts after those that the losses were computed in."""
        if losses.ndim != 1:
            raise ValueError(
                f"losses must have one number a user, shape (B,), got shape {tuple(losses.shape)}; "
                f"use reduction='none' and average over positions, not over users"
            )
        bound_of_function(clip)
        users = len(losses)
        if users == 0:
            return torch.zeros(0, dtype=losses.dtype, device=losses.device), []
        self._refuse_frozen()
        if not together:
            self._look_at_order(losses)
        layout = frozenset(call.layout(users) for call in self._gate.calls)
        possible = self.proof and losses.requires_grad and not together
        doubtful = bool(self._gate.doubts) or any(call.doubtful(users) for call in self._gate.calls)
        new = possible and (self._proven.get(layout, 0) < self._enough or doubtful)
        proving = new or (possible and self._due())
        collected = PerUserNorms(self._gate.calls, set(self._gate.names), losses, forget=not proving)
        self._collect(losses, collected, retain_graph=proving)
        if losses.requires_grad and self._gate.names and not collected.contexts:
            raise UnsupportedUse(
                "the losses do not depend on anything that this engine has recorded: compute them inside its own "
                "`with clipping:`, and call `backward` once for each"
            )
        norms, upper = collected.norms()
        finite = torch.isfinite(norms) & torch.isfinite(losses.detach()) & torch.isfinite(upper)
        factors = self._factors(torch.where(finite, norms, 0), torch.where(finite, upper, 0), clip)
        if proving:
            self._prove(losses, norms, factors, collected.groups, layout if new else None, doubtful)
            if not self._gate.hooked:
                let_go(losses)
        with full_precision(norms.device.type):
            self._add_clipped_sum(collected, finite, torch.where(finite, factors, 0), clip, part)
        last = max(collected.contexts, default=self._gate.context)
        return norms, [call for call in self._gate.calls if call.context > last]

    def _look_at_order(self, losses: Tensor) -> None:
        """Refuses losses that are in another order than the rows: one that was made in a way that is not followed, and
        then taken back in one that is, shows here; so does one that was never taken back."""
        how = picked(losses)
        if how is None:
            return
        if how.index is None or how.total % len(losses):
            self._gate.doubt()
            return
        user = how.user_of_row(UserRows(len(losses), how.packed, "a loss"))
        if not torch.equal(user, torch.arange(len(losses), device=user.device)):
            raise UnsupportedUse(
                "the losses are not in the order of the batch: users' rows were put in another order, and the losses "
                "not back in the first one; or samples were reordered inside the context, and only the losses put "
                "back: reorder samples before `with clipping:`"
            )

    def _refuse_frozen(self) -> None:
        """Rules ask again what is trained when they look back: it must be what was trained in the forward pass."""
        for call in self._gate.calls:
            for managed, name in zip(call.managed, call.names, strict=True):
                if managed.grad_fn is None and not (managed.requires_grad and id(managed) in self._gate.names):
                    raise UnsupportedUse(
                        f"parameter '{name}' was frozen after the forward pass; freeze it before `with clipping:`"
                    )

    def _prove(
        self,
        losses: Tensor,
        norms: Tensor,
        factors: Tensor,
        groups: list[ParameterUses],
        layout: object,
        doubtful: bool,
    ) -> None:
        """Raises if the engine and autograd disagree, or if too many batches in a row could not be compared."""
        calls = [call for call in self._gate.calls if call.grad is not None]
        if prove(losses, norms, factors, calls, groups, self._gate.sink):
            seen = len(losses) if len(losses) > 1 else self._enough  # one user alone is nobody else
            self._proven[layout] = self._proven.get(layout, 0) + seen
            self._put_off = 0
        elif doubtful:
            raise UnsupportedUse(
                "a user's loss or gradient is not finite in a batch whose rows may have changed places, so that "
                "nothing can be proven about it; leave users' rows in the order of the batch, or keep losses finite"
            )
        elif layout is not None:
            self._put_off += 1
            if self._put_off == PATIENCE:
                raise UnsupportedUse(
                    f"{PATIENCE} batches in a row had a user whose loss or gradient is not finite, so that nothing "
                    f"could be proven about the model; look at the losses, or lower the learning rate"
                )

    def _collect(self, losses: Tensor, collected: PerUserNorms, retain_graph: bool) -> None:
        """The one backward pass: brings the gradient of Σ losses to every recorded call."""
        if not losses.requires_grad:
            if self._gate.names:
                raise UnsupportedUse(
                    "the losses do not depend on any trainable parameter; compute them inside `with clipping:`"
                )
            return
        guards = [p.register_hook(self._outside) for p in self._gate.trainable]
        self._gate.sink.append(collected)
        try:
            torch.autograd.backward(losses.sum(), retain_graph=retain_graph)
        finally:
            self._gate.sink.pop()
            for guard in guards:
                guard.remove()
        collected.finish()

    @staticmethod
    def _outside(_: Tensor) -> None:
        """Before the gradient arrives: an optimizer that steps inside the backward pass must not see it."""
        raise UnsupportedUse(
            "a trainable parameter reached the losses without passing the engine: it was used outside "
            "`with clipping:` or in compiled code; run the whole forward pass inside the context"
        )

    def _add_clipped_sum(
        self, collected: PerUserNorms, finite: Tensor, factors: Tensor, clip: ClipFunction, part: Part | None
    ) -> None:
        if not bool(finite.all()):
            self.skipped_users += int((~finite).sum())
            for group in collected.groups:
                group.keep(finite)
            for together in collected.small:
                together.keep(finite)
        small = {id(group): total for some in collected.small for group, total in some.sums(factors)}
        additions = [
            Addition(
                group.parameter,
                partial(group.add_sum, factors) if id(group) not in small else small[id(group)],
                torch.promote_types(factors.dtype, group.parameter.dtype),
                group.written if not group.alone else None,
            )
            for group in collected.groups
        ]
        add_bounded(additions, factors, clip.clip_norm, frozenset(self._gate.names), part=part)

    @staticmethod
    def _factors(norms: Tensor, upper: Tensor, clip: ClipFunction) -> Tensor:
        """c_b of the norm, and no more than brings its upper bound to C, whatever rounding has hidden."""
        factors = clip(norms).to(norms.dtype)
        reached = factors.abs() * norms
        if not bool((reached <= clip.clip_norm * (1 + 1e-5)).all()):
            raise ValueError(
                f"the clip function promises norms up to {clip.clip_norm}, but gave a user {float(reached.max())}"
            )
        most = clip.clip_norm / upper  # infinite for a gradient of zero
        return torch.clamp(factors, -most, most)


def bound_of_function(clip: ClipFunction) -> float:
    """C of a clip function; one that names none is refused, for the optimizer could not know its noise."""
    bound = getattr(clip, "clip_norm", None)
    if not isinstance(bound, int | float) or not (math.isfinite(bound) and bound > 0):
        raise ValueError(f"a clip function must carry its bound as `clip_norm`, a positive number, got {bound!r}")
    return float(bound)


def refuse_distributed(model: nn.Module) -> None:
    """Wrappers that move parameters or gradients between processes in the backward pass, which is not theirs here."""
    fix = "use DistributedClipping and DistributedOptimizer of dpformer.integrations.distributed"
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise UnsupportedUse(f"DistributedDataParallel would never see the clipped sums, so never add them up; {fix}")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and getattr(parameter, "placements", None) is not None:  # a DTensor
            raise UnsupportedUse(
                f"parameter '{name}' is sharded over processes (fully_shard), but a user's norm is over "
                f"all of it; {fix}"
            )
