"""Gradients as the backward pass brings them to the taps, turned into norms as early as possible.

Taps that share a parameter form a family. When the last tap of a family is reached, its norms are computed at once, and
what they were computed from, activations and gradients, can go: the memory of a private pass is hardly more than that
of an ordinary one.
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
from dpformer.clipping.rounding import full_precision
from dpformer.clipping.tap import Tap


@dataclass
class Family:
    """Taps that share parameters, directly or through others."""

    taps: list[Tap]
    missing: int  # taps not reached yet
    late: bool  # expressions of parameters call autograd themselves: not inside the backward pass
    settled: bool = False


class Arrivals:
    """What the one backward pass of a batch of users has brought so far.

    Args:
        taps: of the forward pass.
        trainable: identities of the parameters that are clipped.
        losses: of the users; norms have their device, and their precision or better.
        forget: drop what the norms were computed from (the proof still needs it).
    """

    def __init__(self, taps: Sequence[Tap], trainable: set[int], losses: Tensor, forget: bool) -> None:
        self.users, self.trainable, self.forget = len(losses), trainable, forget
        dtype = torch.promote_types(losses.dtype, torch.float32)
        self.squared = torch.zeros(self.users, dtype=dtype, device=losses.device)  # (B,) Σ of ‖g_b‖² so far
        self.upper = torch.zeros_like(self.squared)  # what it is at most, whatever rounding did
        self.groups: list[ParameterUses] = []
        self.room = norms.KEEP  # numbers of written-out gradients that may still be kept
        self.families = families_of(taps)

    def __call__(self, tap: Tap, grad: Tensor) -> None:
        family = self.families.get(id(tap))
        if family is None:
            raise UnsupportedUse(
                f"{tap.where} was recorded before another backward pass, which let go of it; call `clipping.backward` "
                f"after each `with clipping:`, or run both forward passes inside one and add up their losses"
            )
        tap.grad = grad
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
        reached = [tap for tap in family.taps if tap.grad is not None]
        pairs = [pair for tap in reached for pair in tap.uses(self.users)]
        groups = by_parameter(pairs, self.trainable)
        del pairs
        if self.forget:
            for tap in reached:
                tap.forget()
        for group in groups:
            square, upper = group.squared_norms(self.users, self.room)
            self.squared += square
            self.upper += upper
            self.room -= 0 if group.written is None else group.written.numel()
        self.groups += groups


def families_of(taps: Sequence[Tap]) -> dict[int, Family]:
    """The family of each tap, by the identity of the tap."""
    of_parameter: dict[int, Family] = {}
    of_tap: dict[int, Family] = {}
    for tap in taps:
        keys = [id(p) for managed in tap.managed for p in leaves(managed)]
        joined = Family([tap], 1, late=any(managed.grad_fn is not None for managed in tap.managed))
        for family in {id(f): f for f in (of_parameter.get(key) for key in keys) if f is not None}.values():
            joined.taps += family.taps
            joined.missing += family.missing
            joined.late |= family.late
            of_parameter.update({key: joined for key, f in of_parameter.items() if f is family})
        of_parameter.update(dict.fromkeys(keys, joined))
        of_tap.update({id(member): joined for member in joined.taps})
    return of_tap
