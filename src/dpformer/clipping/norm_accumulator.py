"""Per-user norms: gradients are turned into norms as early as the backward pass has brought them.

Recorded calls that share a parameter form a family. When the last call of a family is reached, its norms are computed
soon, a few parameters together, since small operations cost more to call than to compute; and what they were computed
from, activations and gradients, is freed: the memory of a private pass is hardly more than that of an ordinary one.
Gradients that a rule has written out itself, which are small, wait for the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping import parameter_norms
from dpformer.clipping.batched_norms import AffineCall, BatchedLinear, StackedGradients, can_measure
from dpformer.clipping.parameter_norms import Measured, ParameterUses, by_parameter, measure_all, raised_squares
from dpformer.clipping.recording import RecordedCall, leaves
from dpformer.clipping.rounding import full_precision, raised
from dpformer.clipping.uses import wide
from dpformer.errors import UnsupportedUse
from dpformer.kernels.products import Scratch

WAITING = 1 << 22  # numbers of calls whose uses wait to be measured


@dataclass
class Family:
    """Calls that share parameters, directly or through others."""

    calls: list[RecordedCall]
    missing: int  # calls not reached yet
    late: bool  # expressions of parameters call autograd themselves: not inside the backward pass
    settled: bool = False


class PerUserNorms:
    """What the one backward pass of a batch of users has brought so far.

    Args:
        calls: of the forward pass.
        trainable: identities of the parameters that are clipped.
        losses: of the users; norms have their device, and their precision or better.
        forget: drop what the norms were computed from. The self-check still needs it, and then written-out gradients
            are not kept beside it.
    """

    def __init__(self, calls: Sequence[RecordedCall], trainable: set[int], losses: Tensor, forget: bool) -> None:
        self.users, self.trainable, self.forget, self.device = len(losses), trainable, forget, losses.device
        self.dtype = torch.promote_types(losses.dtype, torch.float32)
        # (2, B) Σ of ‖g_b‖² so far, and what it is at most, whatever rounding did; in float64, so that the order of the
        # parameters does not matter.
        self.squares = np.zeros((2, self.users))
        self.groups: list[ParameterUses] = []
        self.small: list[StackedGradients] = []  # of the groups with one dense use, at the end
        self.waiting: list[ParameterUses] = []  # other parameters to be measured
        self.numbers = 0  # that they hold, at most
        self.scratch = None if forget else Scratch()
        self.linear = BatchedLinear(self.users, self.scratch)  # linear layers to be measured
        self.room = parameter_norms.KEEP  # numbers of written-out gradients that may still be kept
        self.families = families_of(calls)
        self.contexts: set[int] = set()  # of the calls that were reached

    def __call__(self, call: RecordedCall, grad: Tensor) -> None:
        family = self.families.get(id(call))
        if family is None:
            raise UnsupportedUse(
                f"{call.where} was recorded before another backward pass, which has freed it; call `clipping.backward` "
                f"for the loss of each `with clipping.users(...)` in the order of the contexts, once, or run both "
                f"forward passes inside one and add up their losses"
            )
        call.grad = grad
        self.contexts.add(call.context)
        family.missing -= 1
        if family.missing == 0 and not family.late and not self._settled_quickly(call, grad, family):
            self._settle(family)

    def finish(self) -> None:
        """Settles what is left: also families reached only in part, for a use no loss depends on has no gradient."""
        for family in self.families.values():
            if not family.settled:
                self._settle(family)
        with full_precision(self.device.type):
            self._measure()
            beside = {id(group) for some in self.small for group in some.groups}
            self.small += StackedGradients.of([g for g in self.groups if g.is_dense and id(g) not in beside])
        for some in self.small:
            self._add(some.squares().cpu().double().numpy())

    def norms(self) -> tuple[Tensor, Tensor]:
        """(B,) ‖g_b‖, and what it is at most."""
        squared, upper = torch.from_numpy(self.squares).to(wide(self.device))
        norms, most, limits = squared.to(self.dtype).sqrt(), raised(upper, self.dtype), torch.finfo(self.dtype)
        outside = (squared < limits.tiny) | (squared > limits.max)  # squares that this precision has no room for
        norms = torch.where(outside, squared.sqrt().to(self.dtype), norms)
        if self.device.type != "cpu":
            norms, most = torch.stack([norms, most]).to(self.device)  # in one copy
        return norms, most

    def _settled_quickly(self, call: RecordedCall, grad: Tensor, family: Family) -> bool:
        """Linear layers that are used once wait for others, if they are as plain as most."""
        if type(call) is not AffineCall or len(family.calls) > 1:
            return False
        if not can_measure(call, grad, self.users) or self.linear.room + self.users * call.weight.numel() > self.room:
            return False
        family.settled = True
        self.linear.add(call, grad)
        if self.forget:
            call.forget()
        if self.linear.numbers > WAITING:
            with full_precision(self.device.type):
                self._measure_linear()
        return True

    def _settle(self, family: Family) -> None:
        family.settled = True
        with full_precision(self.device.type):
            reached = [call for call in family.calls if call.grad is not None]
            groups = by_parameter([pair for call in reached for pair in call.uses(self.users)], self.trainable)
            self.groups += groups
            self.waiting += [group for group in groups if not group.is_dense]
            self.numbers += sum(call.numbers for call in reached)
            if self.forget:
                for call in reached:
                    call.forget()
            if self.numbers > WAITING:
                self._measure()

    def _measure(self) -> None:
        """The norms of what is waiting."""
        self._measure_linear()
        groups, self.waiting, self.numbers = self.waiting, [], 0
        kinds: dict[torch.dtype, list[Measured]] = {}
        for measured in measure_all(groups, self.users, self.room, again=self.scratch):
            self.room -= measured[0].group.room
            if len(measured) == 1:
                kinds.setdefault(measured[0].dtype, []).append(measured[0])
                continue
            for m in measured:  # a few users at a time
                self._add(np.stack(raised_squares([m]))[:, 0], m.first)
        for some in kinds.values():
            self._add_all(*raised_squares(some))

    def _measure_linear(self) -> None:
        linear, self.linear = self.linear, BatchedLinear(self.users, self.scratch)
        if not linear.numbers:
            return
        found = linear.measure()
        self.groups += found.groups
        self.room -= sum(group.room for group in found.groups)
        if found.small is not None:
            self.groups += found.small.groups
            self.small.append(found.small)
        self._add_all(*found.squares)
        if found.others:
            self._add_all(*raised_squares(found.others))

    def _add_all(self, squares: np.ndarray, upper: np.ndarray) -> None:
        """(G, B) each: one by one, wherever the waiting ends."""
        for one in np.stack([squares, upper], 1):
            self._add(one)

    def _add(self, squares: np.ndarray, first: int = 0) -> None:
        """(2, n) of users from `first` on."""
        self.squares[:, first : first + squares.shape[1]] += squares


def families_of(calls: Sequence[RecordedCall]) -> dict[int, Family]:
    """The family of each call, by the identity of the call."""
    of_parameter: dict[int, Family] = {}
    of_call: dict[int, Family] = {}
    for call in calls:
        joined = Family([call], 1, late=any(managed.grad_fn is not None for managed in call.managed))
        of_call[id(call)] = joined
        made_of = [p for managed in call.managed for p in leaves(managed)] if joined.late else call.managed
        for key in map(id, made_of):
            family = of_parameter.get(key)
            of_parameter[key] = joined
            if family is None or family is joined:
                continue
            joined.calls += family.calls
            joined.missing += family.missing
            joined.late |= family.late
            of_parameter.update({key: joined for key, f in of_parameter.items() if f is family})
            of_call.update({id(member): joined for member in family.calls})
    return of_call
