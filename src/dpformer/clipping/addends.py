"""Whose losses a sum holds: one `Addend` per backward pass, with the part of the batch that it was given.

A user who is in a sum twice counts 2C there, so a second time is refused, whichever micro-batch, engine or process
adds it. Users of two batches in one sum would be two Poisson samples priced as one, so they are refused too. And a
step that claims to be of a batch must hold all of it: if who is left out depends on who else was drawn, one user
changes more than its own summand. Without a part nobody knows whose losses they are: then that each user counts once
is assumed, and the step is accounted for without amplification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpformer.sampling.batch import Batch, Part


@dataclass(eq=False, slots=True)
class Addend:
    """One backward pass: the users whose clipped gradients it added; None: not told."""

    part: Part | None


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
