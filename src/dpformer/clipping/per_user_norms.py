"""Per-user norms: gradients are turned into norms as early as the backward pass has brought them.

Recorded calls that share a parameter form a family. When the last call of a family is reached, its norms are computed
at once, and what they were computed from, activations and gradients, is freed: the memory of a private
pass is hardly more than that of an ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpformer.clipping import norms
from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.gate import leaves
from dpformer.clipping.norms import ParameterUses, by_parameter
from dpformer.clipping.recorded_call import RecordedCall
from dpformer.clipping.rounding import full_precision


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
        forget: drop what the norms were computed from (the proof still needs it).
    """

    def __init__(self, calls: Sequence[RecordedCall], trainable: set[int], losses: Tensor, forget: bool) -> None:
        self.users, self.trainable, self.forget = len(losses), trainable, forget
        dtype = torch.promote_types(losses.dtype, torch.float32)
        self.squared = torch.zeros(self.users, dtype=dtype, device=losses.device)  # (B,) Σ of ‖g_b‖² so far
        self.upper = torch.zeros_like(self.squared)  # what it is at most, whatever rounding did
        self.groups: list[ParameterUses] = []
        self.room = norms.KEEP  # numbers of written-out gradients that may still be kept
        self.families = families_of(calls)
        self.contexts: set[int] = set()  # of the calls that were reached

    def __call__(self, call: RecordedCall, grad: Tensor) -> None:
        family = self.families.get(id(call))
        if family is None:
            raise UnsupportedUse(
                f"{call.where} was recorded before another backward pass, which let go of it; call `clipping.backward` "
                f"for the losses of each `with clipping:` in the order of the contexts, once, or run both forward "
                f"passes inside one and add up their losses"
            )
        call.grad = grad
        self.contexts.add(call.context)
        family.missing -= 1
        if family.missing == 0 and not family.late:
            self._settle(family)

    def finish(self) -> None:
        """Settles what is left: also families reached only in part, for a use no loss depends on has no gradient."""
        for family in self.families.values():
            if not family.settled:
                self._settle(family)

    def _settle(self, family: Family) -> None:
        family.settled = True
        with full_precision(self.squared.device.type):
            self._add_norms(family)

    def _add_norms(self, family: Family) -> None:
        reached = [call for call in family.calls if call.grad is not None]
        pairs = [pair for call in reached for pair in call.uses(self.users)]
        groups = by_parameter(pairs, self.trainable)
        del pairs
        if self.forget:
            for call in reached:
                call.forget()
        for group in groups:
            square, upper = group.squared_norms(self.users, self.room)
            self.squared += square
            self.upper += upper
            self.room -= 0 if group.written is None else group.written.numel()
        self.groups += groups


def families_of(calls: Sequence[RecordedCall]) -> dict[int, Family]:
    """The family of each call, by the identity of the call."""
    of_parameter: dict[int, Family] = {}
    of_call: dict[int, Family] = {}
    for call in calls:
        joined = Family([call], 1, late=any(managed.grad_fn is not None for managed in call.managed))
        of_call[id(call)] = joined
        for key in [id(p) for managed in call.managed for p in leaves(managed)]:
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
