"""The training loop of a run: step, record, periodic evaluation, periodic checkpoint."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from dpformer.errors import DpformerError
from dpformer.runs.folder import Metrics
from dpformer.runs.progress import TrainingProgress
from dpformer.runs.signals import Interrupted, stop_requested

if TYPE_CHECKING:
    from dpformer.runs.session import Session
    from dpformer.training.plan import Plan
    from dpformer.training.trainer import Step, Trainer


def train_to_the_end(session: Session, trainer: Trainer) -> None:
    """Take the remaining steps; interruptions happen only between two of them."""
    config, plan = session.config, session.plan
    metrics = Metrics(session.folder.metrics, trainer.step)
    progress = TrainingProgress(plan.steps, start=trainer.step, private=plan.private)
    saved = time.monotonic()
    with stop_requested() as stop, progress:
        while trainer.step < plan.steps:
            record = step_record(_advance(trainer, private=config.private), trainer, plan)
            metrics.add(record)
            progress.update(record)
            if evaluation_is_due(trainer.step, plan, config.evaluate_every):
                metrics.add(record := _evaluate(session, trainer))
                progress.say(session.task.line(record))
            if stop.is_set() or time.monotonic() - saved >= config.checkpoint_seconds:
                session.save(trainer)
                saved = time.monotonic()
            if stop.is_set():
                raise Interrupted(
                    f"interrupted after step {trainer.step:,} of {plan.steps:,}; everything is saved; resume with: "
                    f"dpformer train --resume {session.folder.path}"
                )
    metrics.close()


def _advance(trainer: Trainer, *, private: bool) -> Step:
    try:
        return trainer.advance()
    except ValueError as error:
        if private:  # non-finite gradients are left out of the sum
            raise
        raise DpformerError(f"training without clipping has diverged ({error}): lower --learning-rate") from None


def step_record(step: Step, trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """The record of a step in metrics.jsonl: exact statistics of the data, and an upper bound on ε so far."""
    losses = torch.cat([part.losses for part in step.parts]) if step.parts else torch.zeros(0)
    norms = torch.cat([part.norms for part in step.parts if part.norms is not None] or [torch.zeros(0)])
    losses, norms = losses[losses.isfinite()], norms[norms.isfinite()]
    spent = plan.spent(step.number)
    return {
        "step": step.number,
        "epoch": round(step.number * plan.sample_rate, 4),
        "loss": float(losses.mean()) if len(losses) else None,
        "median_norm": float(norms.median()) if len(norms) else None,
        "users": step.users,
        "skipped_users": trainer.sum.skipped_users,
        "learning_rate": step.learning_rate,
        "epsilon": spent if math.isfinite(spent) else None,
        "micro_batch_tokens": trainer.sum.tokens,
        "seconds": round(step.seconds, 4),
    }


# Evaluation on users' held-out items: for the owner only, and without influence on training.


def evaluation_is_due(step: int, plan: Plan, every: int) -> bool:
    """After every `every` epochs, and at the end; 0: never."""
    if not every:
        return False
    epoch, before = (int(taken * plan.sample_rate + 1e-9) for taken in (step, step - 1))
    return epoch // every > before // every or step == plan.steps


def _evaluate(session: Session, trainer: Trainer) -> dict[str, Any]:
    found = session.task.evaluate(trainer.released(), session.dataset, session.vocabulary, session.config)
    epoch = round(trainer.step * session.plan.sample_rate, 4)
    return {"step": trainer.step, "epoch": epoch, **found, "covered": False}
