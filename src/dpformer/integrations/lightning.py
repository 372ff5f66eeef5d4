"""Lightning: a LightningModule with user-level differential privacy, by automatic optimisation.

    class Model(Private, L.LightningModule):
        def user_losses(self, part):            # instead of training_step: one loss per user
            ...
        def configure_optimizers(self):
            return self.private(torch.optim.AdamW(self.parameters(), lr=1e-3))

    model = Model()
    model.make_private(users, collate=collate, epsilon=8, batch_size=32, steps=1000, keys="keys")
    L.Trainer(max_steps=1000).fit(model)        # the module provides the batches of users

Lightning's "epoch" is the entire run. Checkpoints resume exactly; they contain the statement but no key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpformer.errors import DpformerError
from dpformer.integrations.batches import Collate, LogicalBatch, Part, StepsLeft, only
from dpformer.integrations.session import PrivateSession
from dpformer.integrations.users import Users
from dpformer.integrations.vault import VaultOptimizer


class Private:
    """A mixin to be inherited before LightningModule, of `lightning` or `pytorch_lightning`."""

    session: PrivateSession | None = None

    def make_private(
        self,
        users: Any,
        *,
        by: str | None = None,
        collate: Collate,
        batch_size: int,
        steps: int,
        keys: str | Path,
        rows: int = 8,
        **named: Any,
    ) -> None:
        """Give the module its data and budget.

        Args:
            users: a data set with one user per item; or, with `by`, one example per item.
            by: the column of user ids.
            collate: maps the examples of *one* user to a dict of tensors, one row per example.
            batch_size: expected number of users per step.
            steps: maximum number of steps.
            keys: a folder for the keys of the run, away from what is uploaded.
            rows: maximum number of examples computed at once.
            named: `epsilon`, `delta`, `clipping`, `unit`, `seed` of `PrivateSession`.
        """
        people = users if isinstance(users, Users) else Users(users, by)
        self.session = PrivateSession(
            self,  # type: ignore[arg-type]
            people,
            batch_size=batch_size,
            steps=steps,
            keys=Path(keys),
            **named,
        )
        self._collate, self._rows = collate, rows

    def user_losses(self, part: Part) -> Tensor:
        """(B,): one loss per user, from `part.inputs`; `part.mean` averages over each user's own values."""
        raise NotImplementedError

    def private(self, inner: torch.optim.Optimizer) -> VaultOptimizer:
        """The optimizer that adds the noise."""
        return self._made().make_optimizer(inner)

    def _made(self) -> PrivateSession:
        if self.session is None:
            raise DpformerError("the module has no data and budget yet: call make_private(users, …) before fit")
        return self.session

    # Hooks called by Lightning.

    def train_dataloader(self) -> Any:
        session = self._made()
        data = session.logical_batches(self._collate, self._rows)
        return torch.utils.data.DataLoader(
            data,
            batch_sampler=StepsLeft(session.steps, lambda: session.taken),
            collate_fn=only,
        )

    def on_fit_start(self) -> None:
        if type(self).user_losses is Private.user_losses and "user_losses" not in vars(self):
            raise DpformerError(
                f"{type(self).__name__} has no user_losses: a training_step of its own returns one loss for the whole "
                "batch, which cannot be bounded per user; define user_losses(self, part), which returns one per user"
            )
        steps, trainer = self._made().steps, self.trainer  # type: ignore[attr-defined]
        if not 0 < trainer.max_steps <= steps:
            raise DpformerError(f"max_steps={trainer.max_steps}, but the budget is for {steps}: give max_steps={steps}")
        if trainer.world_size > 1:
            raise DpformerError(
                f"there are {trainer.world_size} processes, but Lightning would average gradients before they are "
                "clipped: use devices=1, or see docs/guide/several-machines.md"
            )
        if not self.automatic_optimization:  # type: ignore[attr-defined]
            raise DpformerError("automatic_optimization is off, but this adapter takes the steps: leave it on")
        if trainer.accumulate_grad_batches != 1 or trainer.gradient_clip_val:
            raise DpformerError(
                "accumulate_grad_batches and gradient_clip_val would change sums of clipped gradients; bound each "
                "user with clipping=dp.clip(C), and limit memory with rows"
            )
        if str(trainer.precision).startswith("16"):
            raise DpformerError(f"precision={trainer.precision!r} scales gradients: use bf16-mixed or 32-true")
        if [type(one) for one in trainer.optimizers] != [VaultOptimizer]:
            raise DpformerError("configure_optimizers must return one optimizer, self.private(torch.optim.…)")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if not isinstance(batch, LogicalBatch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        return LogicalBatch(batch.step, [part.to(device) for part in batch])

    def training_step(self, batch: LogicalBatch, batch_idx: int) -> Tensor:
        """Add the clipped sums of all parts of a batch to `p.grad`."""
        session = self._made()
        for part in session.due(batch):
            session.add(self.user_losses, part, self.device)  # type: ignore[attr-defined]
        return torch.zeros((), device=self.device)  # type: ignore[attr-defined]  # the loss is private

    def backward(self, loss: Tensor, *given: Any, **named: Any) -> None:
        """Done in `training_step`, part by part."""

    def optimizer_zero_grad(self, *given: Any, **named: Any) -> None:
        """Lightning would do this between the backward pass, which is already done, and the step."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None, **named: Any
    ) -> None:
        optimizer_closure()
        private = self._made().optimizer
        assert private is not None
        private.step()
        private.zero_grad()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._made().taken:
            checkpoint["privacy"] = self._made().statement()
