"""Phantom Clipping: the clipped sum of per-user gradients in one backward pass, exact or refused."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpformer import compat
from dpformer.clipping.bounded_sum import Addition, add_bounded
from dpformer.clipping.clip_functions import ClipFunction
from dpformer.clipping.functions import foreign
from dpformer.clipping.isolation import EqualChances, Outcome, compare_outcomes, generators_kept, is_finite
from dpformer.clipping.model_state import State, Walk
from dpformer.clipping.norm_accumulator import PerUserNorms
from dpformer.clipping.parameter_norms import ParameterUses
from dpformer.clipping.recording import RecordedCall
from dpformer.clipping.rounding import full_precision
from dpformer.clipping.self_check import PATIENCE, compare_with_autograd, due, free_graph
from dpformer.clipping.trees import map_tensors, rows_of, tree_of, versions_of
from dpformer.clipping.users import OneUserExists, gradients_of, refuse_distributed
from dpformer.errors import UnsupportedUse, first_line, out_of_memory
from dpformer.sampling.batch import Part

ENOUGH = 16  # users whose gradients are compared with autograd at the start
TOGETHER, ALONE = 16, 4  # users who are computed together, and those of them who are computed alone


class PhantomClipping:
    """Per-user clipping without per-user gradients, for any `nn.Module`.

        with clipping.users(histories[part.users], part) as user:  # inside, one user exists
            loss = model(user)                                     # its loss; user has a leading dimension of 1
        norms = clipping.backward(loss, normalize(1.0))            # (B,)

    Inside `users` torch's own vmap holds users apart, so no function of torch can bring two of them together. What it
    cannot batch is computed one user at a time, which is exact for any model and as slow as batches of one; it is said
    once, and counted in `fallbacks`. Tensors that come in past `users`, and those of users of other batches, are
    refused. Public is what the model held before its first batch (parameters, buffers, attributes) or was declared.
    Not seen are numbers that Python itself carries from one user to another (`.item()` into a list that the loss reads,
    in what is computed one user at a time), and code that leaves torch's own interception, which the guide names:
    `accumulate`, which can call the loss again, looks for what they do to losses and gradients, and so does `dp.check`.

    `backward` adds Σ_i c_i g_i to `p.grad` of every trainable parameter, with g_i the gradient of user i's loss and
    c_i = clip(‖g_i‖) its factor; it returns the norms ‖g_i‖, over all trainable parameters together. It is a *sum* over
    users, never a mean, so any split of a batch into parts gives the same `p.grad`.

    A user whose loss or gradient is not finite contributes nothing and is counted in `skipped_users`.

    Args:
        model: the module whose trainable parameters are clipped.
        self_check: compare the gradients of all users with plain autograd on the first batches (until `check_users`
            were seen) and at random later; and, in `accumulate`, the losses and gradients of some users together with
            those of each alone and outside of the engine, on the first batch and at random later (self_check.py).
            Switched off, the events of the steps say so.
        fallback: "error" refuses what torch cannot compute for all users together.
        check_users: users whose gradients are compared at the start.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        self_check: bool = True,
        fallback: Literal["one at a time", "error"] = "one at a time",
        check_users: int = ENOUGH,
    ) -> None:
        refuse_distributed(model)
        if fallback not in ("one at a time", "error"):
            raise ValueError(f'fallback is {fallback!r}; give "one at a time" or "error"')
        self.model = model
        self.self_check, self.check_users = self_check, check_users
        self.skipped_users = 0
        self.losses = torch.zeros(0)  # (B,) of the users of the last backward pass
        self._walk = Walk(model)
        self._users = OneUserExists(model, self._walk, fallback == "one at a time")
        self._gate = self._users.gate
        self._compared = 0  # users
        self._compared_alone = 0
        self._put_off = 0  # batches that were to be compared and could not be

    @contextmanager
    def users(self, data: Any, part: Part | None = None) -> Iterator[Any]:
        """Inside, one user exists: gives the data of one user, with a leading dimension of 1.

        Args:
            data: a tensor whose first dimension counts the users, or a tuple, list, dict or dataclass of such tensors.
            part: the users of the batch whose data it is; without it the step claims no sampling.
        """
        with self._surroundings(), self._users.of(data, part) as user:
            yield user

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Of every forward pass; for engines whose model is on several processes."""
        yield

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
        if not rows_of(data):
            self.losses = torch.zeros(0)
            return self.losses
        if self.self_check and (self._compared_alone < 2 or due()):
            self._check_alone(loss_of, data)
        before = versions_of(data)
        try:
            with self.users(data, part) as user:
                loss = loss_of(user)
        except Exception as error:
            why = self._users.why_not_together(error)
            if why is None:
                raise
        else:
            return self.backward(loss, clip)
        if versions_of(data) != before:
            raise UnsupportedUse(
                f"the loss writes into the users' data, and cannot be computed for all users together ({why}): let it "
                f"work on a clone of them"
            )
        norms = self._one_at_a_time(loss_of, data, clip, part)
        self._users.fallback.note("the whole loss", why, whole=True)
        return norms

    def _one_at_a_time(
        self, loss_of: Callable[[Any], Tensor], data: Any, clip: ClipFunction, part: Part | None
    ) -> Tensor:
        """The same, by plain autograd on one user after the other."""
        parameters = list(self._gate.trainable)
        device = next(self.model.parameters()).device
        totals = [
            torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float64), device=p.device) for p in parameters
        ]
        norms, factors, losses = [], [], []
        with self._surroundings():
            for gradients, loss in self._users.one_by_one(loss_of, data):
                norm = torch.stack([g.abs().double().square().sum().to(device) for g in gradients]).sum().sqrt()
                norms.append(norm)
                losses.append(loss.reshape(()))
                if not bool(torch.isfinite(norm)) or not bool(torch.isfinite(loss)):
                    self.skipped_users += 1
                    factors.append(torch.zeros((), dtype=norm.dtype, device=device))
                    continue
                (factor,), _ = self._factors(norm.isfinite(), norm[None], norm[None] * (1 + 1e-9), clip)
                factors.append(factor)
                for total, g in zip(totals, gradients, strict=True):
                    total += g.to(total.dtype) * factors[-1].to(total.device)
        dtypes = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
        additions = [Addition(p, t.to(d), d) for p, t, d in zip(parameters, totals, dtypes, strict=True)]
        self.losses = torch.stack(losses)
        dtype = torch.promote_types(self.losses.dtype, torch.float32)
        names = frozenset(self._gate.names)
        checked = self.self_check
        add_bounded(additions, torch.stack(factors).to(dtype), clip.clip_norm, names, part=part, self_checked=checked)
        return torch.stack(norms).to(dtype)

    def _check_alone(self, loss_of: Callable[[Any], Tensor], data: Any) -> None:
        """Computes some users together, and some of them alone by plain autograd, and compares."""
        chance, users = random.SystemRandom(), rows_of(data)
        tree, one_of = tree_of(data)
        some = torch.tensor(sorted(chance.sample(range(users), min(users, TOGETHER))))
        tree = map_tensors(lambda leaf: leaf[some.to(leaf.device)], tree)
        chances = EqualChances(chance.getrandbits(32))
        with self._surroundings(), generators_kept(), self._users.fallback.quiet():
            together = self._together(lambda mine: loss_of(one_of(mine)), tree, chances)
            finite = [n for n, outcome in enumerate(together) if is_finite(outcome)]
            state, alone = State(self._walk()), {}
            for n in chance.sample(finite, min(ALONE, len(finite))):
                mine = map_tensors(lambda leaf: leaf[n : n + 1].clone(), tree)  # noqa: B023
                with chances, torch.enable_grad():
                    outcome = self._outside_of_engine(loss_of, one_of(mine))
                if outcome is not None:
                    alone[n] = outcome
            state.compare(self._walk(), self._gate.is_public)
        compare_outcomes(together, alone, chances.half)
        self._compared_alone += len(finite)

    def _outside_of_engine(self, loss_of: Callable[[Any], Tensor], mine: Any) -> Outcome | None:
        """Loss and gradient of one user, by plain autograd; None where torch lacks a function that rules do without."""
        try:
            loss = loss_of(mine).reshape(())
            return loss.detach(), gradients_of(loss, self._gate.trainable)
        except NotImplementedError as error:
            why = first_line(error)
            warnings.warn(f"users alone are not compared, since torch cannot compute them here: {why}", stacklevel=5)
            return None
        except Exception as error:
            if out_of_memory(error):
                raise
            raise UnsupportedUse(
                f"the loss of a user alone, outside of the engine, ends in an error, and inside it does not: keep "
                f"nothing of users between calls of the model ({first_line(error)})"
            ) from error

    def _together(self, loss_of: Callable[[Any], Tensor], tree: Any, chances: EqualChances) -> list[Outcome]:
        """Losses and gradients of users as this engine computes them; nothing is added to `p.grad`."""
        waiting = list(self._gate.calls)
        try:
            with chances, self._users.of(tree, None) as user:
                loss = loss_of(user)
            losses, _ = self._users.losses(loss)
            return list(zip(losses.detach(), self._each_gradient(losses, waiting), strict=True))
        except Exception as error:
            if self._users.why_not_together(error) is None:
                raise

            def with_chances(mine: Any) -> Tensor:
                with chances:
                    return loss_of(mine)

            return [(loss.reshape(()), found) for found, loss in self._users.one_by_one(with_chances, tree)]
        finally:
            self._gate.calls[:] = waiting

    def _each_gradient(self, losses: Tensor, waiting: list[RecordedCall]) -> list[list[Tensor]]:
        """By all trainable parameters, of each user; from the calls that were recorded last."""
        parameters = self._gate.trainable
        calls = self._gate.calls[len(waiting) :]
        collected = PerUserNorms(calls, set(self._gate.names), losses, forget=False)
        self._collect(losses, collected, retain_graph=False)
        groups, each = {id(group.parameter): group for group in collected.groups}, []
        with full_precision(losses.device.type):
            for user in range(len(losses)):
                one = torch.zeros(len(losses), dtype=collected.dtype, device=losses.device)
                one[user] = 1
                found = [
                    groups[id(p)].weighted_sum(one) if id(p) in groups else torch.zeros_like(p) for p in parameters
                ]
                each.append(found)
        return each

    def backward(self, loss: Tensor, clip: ClipFunction) -> Tensor:
        """Adds the clipped sum of the users' gradients to `p.grad`; returns the norms before clipping, shape (B,).

        Several contexts may come first, then a backward pass for the losses of each, in the same order.

        Args:
            loss: one user's loss, one number, from inside `users`.
            clip: the factor of each user by its norm.
        """
        if seeing := foreign(compat.modes_below()):
            raise UnsupportedUse(
                f"{seeing} is active, which would see the gradients of all users together: leave it before "
                f"`clipping.backward`"
            )
        later: list[RecordedCall] = []
        with self._users.of_this_thread():
            try:
                losses, part = self._users.losses(loss)
                self.losses = losses.detach()
                norms, later = self._backward(losses, clip, part)
                return norms
            finally:
                self._gate.calls[:] = later

    def _backward(self, losses: Tensor, clip: ClipFunction, part: Part | None) -> tuple[Tensor, list[RecordedCall]]:
        """The norms, and the calls of contexts after those that the losses were computed in."""
        bound_of_function(clip)
        self._refuse_frozen()
        possible = self.self_check and losses.requires_grad
        new = possible and self._compared < self.check_users
        comparing = new or (possible and due())
        collected = PerUserNorms(self._gate.calls, set(self._gate.names), losses, forget=not comparing)
        self._collect(losses, collected, retain_graph=comparing)
        if losses.requires_grad and self._gate.names and not collected.contexts:
            raise UnsupportedUse(
                "the losses do not depend on anything that this engine has recorded: compute them inside its own "
                "`with clipping.users(...)`, and call `backward` once for each"
            )
        norms, upper = collected.norms()
        finite = torch.isfinite(norms) & torch.isfinite(losses.detach()) & torch.isfinite(upper)
        factors, all_finite = self._factors(finite, torch.where(finite, norms, 0), torch.where(finite, upper, 0), clip)
        if comparing:
            self._compare(losses, norms, factors, collected.groups, new)
            if not self._gate.hooked:
                free_graph(losses)
        with full_precision(norms.device.type):
            if not all_finite:
                self._leave_out(collected, finite)
                factors = torch.where(finite, factors, 0)
            self._add_clipped_sum(collected, factors, clip, part)
        last = max(collected.contexts, default=self._gate.context)
        return norms, [call for call in self._gate.calls if call.context > last]

    def _refuse_frozen(self) -> None:
        """Rules ask again what is trained when they look back: it must be what was trained in the forward pass."""
        for call in self._gate.calls:
            for managed, name in zip(call.managed, call.names, strict=True):
                if managed.grad_fn is None and not (managed.requires_grad and id(managed) in self._gate.names):
                    raise UnsupportedUse(
                        f"parameter '{name}' was frozen after the forward pass; freeze it before `clipping.users`"
                    )

    def _compare(
        self,
        losses: Tensor,
        norms: Tensor,
        factors: Tensor,
        groups: list[ParameterUses],
        new: bool,
    ) -> None:
        """Raises if the engine and autograd disagree, or if too many batches in a row could not be compared."""
        calls = [call for call in self._gate.calls if call.grad is not None]
        if compare_with_autograd(losses, norms, factors, calls, groups, self._gate.sink):
            self._compared += len(losses)
            self._put_off = 0
        elif new:
            self._put_off += 1
            if self._put_off == PATIENCE:
                raise UnsupportedUse(
                    f"{PATIENCE} batches in a row had a user whose loss or gradient is not finite, so that nothing "
                    f"could be compared with autograd; look at the losses, or lower the learning rate"
                )

    def _collect(self, losses: Tensor, collected: PerUserNorms, retain_graph: bool) -> None:
        """The one backward pass: brings the gradient of Σ losses to every recorded call."""
        if not losses.requires_grad:
            if self._gate.names:
                raise UnsupportedUse(
                    "the loss does not depend on any trainable parameter: compute it inside `with clipping.users(...)`"
                )
            return
        guards = [p.register_hook(self._outside) for p in self._gate.trainable]
        self._gate.sink.append(collected)
        try:
            torch.autograd.backward(losses.sum(), retain_graph=retain_graph)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise UnsupportedUse(
                    f"a tensor was changed in place after a function had read it: build a new tensor instead ({error})"
                ) from error
            raise
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
            "`with clipping.users(...)` or in compiled code; run the whole forward pass inside the context"
        )

    def _leave_out(self, collected: PerUserNorms, finite: Tensor) -> None:
        """Users whose loss or gradient is not finite."""
        self.skipped_users += int((~finite).sum())
        for group in collected.groups:
            group.keep(finite)
        for together in collected.small:
            together.keep(finite)

    def _add_clipped_sum(self, collected: PerUserNorms, factors: Tensor, clip: ClipFunction, part: Part | None) -> None:
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
        names = frozenset(self._gate.names)
        add_bounded(additions, factors, clip.clip_norm, names, part=part, self_checked=self.self_check)

    @staticmethod
    def _factors(finite: Tensor, norms: Tensor, upper: Tensor, clip: ClipFunction) -> tuple[Tensor, bool]:
        """c_b of the norm, and no more than brings its upper bound to C, whatever rounding has hidden.

        Also whether all users are finite: both checks are read at once.
        """
        factors = clip(norms).to(norms.dtype)
        reached = factors.abs() * norms
        is_bounded, all_finite = torch.stack([(reached <= clip.clip_norm * (1 + 1e-5)).all(), finite.all()]).tolist()
        if not is_bounded:
            raise ValueError(
                f"the clip function promises norms up to {clip.clip_norm}, but gave a user {float(reached.max())}"
            )
        most = clip.clip_norm / upper  # infinite for a gradient of zero
        return torch.clamp(factors, -most, most), all_finite


def bound_of_function(clip: ClipFunction) -> float:
    """C of a clip function; one that names none is refused, for the optimizer could not know its noise."""
    bound = getattr(clip, "clip_norm", None)
    if not isinstance(bound, int | float) or not (math.isfinite(bound) and bound > 0):
        raise ValueError(f"a clip function must carry its bound as `clip_norm`, a positive number, got {bound!r}")
    return float(bound)
