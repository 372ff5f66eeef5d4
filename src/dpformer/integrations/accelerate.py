"""Accelerate: a custom training loop with user-level differential privacy.

    private = make_private(accelerator, model, optimizer, users, collate=collate, epsilon=8, batch_size=32, steps=1000,
                           keys="keys")
    for batch in private:                       # the users of a step
        for part in batch:                      # users that fit into memory together
            private.backward(losses_of, part)   # instead of accelerator.backward
        private.step()                          # adds noise once, steps the optimizer, zero_grad

`losses_of(part)` returns one loss per user, from `private.model`, `part.inputs` and `part.mean`; it is called more than
once when `dp.check` compares users computed alone and together.

`accelerator.save_state` and `load_state` resume exactly. Their files contain no key: the keys are in `keys`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpformer.errors import DpformerError, MissingExtra
from dpformer.integrations.batches import Collate, LogicalBatch, Part, StepsLeft, only
from dpformer.integrations.independent_users import LossesOf
from dpformer.integrations.session import PrivateSession
from dpformer.integrations.users import Users

try:
    from accelerate import Accelerator
except ImportError:
    raise MissingExtra("accelerate", "hf") from None


class PrivateLoop:
    """The objects of a training loop: batches of users, `backward`, `step`. Created by `make_private`."""

    def __init__(self, accelerator: Accelerator, session: PrivateSession, optimizer: Any, collate: Collate, rows: int):
        self.accelerator, self.session, self.rows, self.collate = accelerator, session, rows, collate
        self.model, self.optimizer = accelerator.prepare(session.model, session.make_optimizer(optimizer))

    def __iter__(self) -> Iterator[LogicalBatch]:
        """The batches of the remaining steps, on the accelerator's device."""
        data = self.session.logical_batches(self.collate, self.rows)
        sampler = StepsLeft(self.session.steps, lambda: self.session.taken)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=only)
        for batch in loader:
            self.session.due(batch)
            self.model.train()
            yield LogicalBatch(batch.step, [part.to(self.accelerator.device) for part in batch])

    def backward(self, losses_of: LossesOf, part: Part) -> Tensor:
        """Add the clipped sum of the users' gradients to `p.grad`; returns their losses, which are private.

        Args:
            losses_of: maps a part to one loss per user, shape (B,). Dropout masks in it are secret.
            part: a part of the batch.
        """
        return self.session.add(losses_of, part, self.accelerator.device)

    def step(self) -> None:
        """Take the noisy step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_private(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    users: Any,
    *,
    by: str | None = None,
    collate: Collate,
    batch_size: int,
    steps: int,
    keys: str | Path,
    rows: int = 8,
    **named: Any,
) -> PrivateLoop:
    """The parts of a private training loop, prepared by the accelerator.

    Args:
        accelerator: an accelerator with one process, in float32 or bf16.
        model: the model, not yet prepared.
        optimizer: the optimizer of the model's parameters, not yet prepared.
        users: a data set with one user per item; or, with `by`, one example per item.
        by: the column of user ids.
        collate: maps the examples of *one* user to a dict of tensors, one row per example.
        batch_size: expected number of users per step.
        steps: maximum number of steps.
        keys: a folder for the keys of the run, away from what is uploaded.
        rows: maximum number of examples computed at once.
        named: `epsilon`, `delta`, `clipping`, `unit`, `seed` of `PrivateSession`.
    """
    if accelerator.num_processes > 1:
        raise DpformerError(
            f"there are {accelerator.num_processes} processes, but Accelerate would average gradients before they are "
            "clipped: run one process, or see docs/guide/several-machines.md"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise DpformerError(f"mixed_precision={accelerator.mixed_precision!r} scales gradients: use bf16 or no")
    if accelerator.gradient_accumulation_steps > 1:
        raise DpformerError(
            "gradient_accumulation_steps is more than 1, but batches are already split into parts: omit it"
        )
    people = users if isinstance(users, Users) else Users(users, by)
    model = model.to(accelerator.device)
    session = PrivateSession(model, people, batch_size=batch_size, steps=steps, keys=Path(keys), **named)
    return PrivateLoop(accelerator, session, optimizer, collate, rows)
