"""One private run inside another library's trainer: budget, sampler, clipping, noise, ledger and statement together.

Created once from public numbers, so that sampling, clipping, noise and accounting cannot disagree:

    q = expected batch size / users,     σ = calibrate(ε, δ, q, steps),     C = clip norm
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.accounting import Ledger, calibrate
from dpformer.accounting.units import unit_of
from dpformer.clipping import PhantomClipping, normalize
from dpformer.clipping.clip_functions import ClipFunction, clip
from dpformer.errors import DpformerError
from dpformer.integrations.batches import Collate, LogicalBatch, LogicalBatches, Part, drawing_from
from dpformer.integrations.independent_users import LossesOf, UsersCheck
from dpformer.integrations.users import Users
from dpformer.integrations.vault import Vault, VaultOptimizer
from dpformer.noise.randomness import SecureRandom
from dpformer.sampling import Batch, PoissonBatches
from dpformer.statement import sp800_226
from dpformer.statement.build import statement

NOT_COVERED = (
    "Training losses, gradient norms and batch sizes are exact statistics of the data: keep them as private as the "
    "data.",
    "Metrics on evaluation data, and choices based on them, are not covered for the people in that data.",
    "The keys of the run, which are in a separate folder, allow removing the noise. Delete them when the run no "
    "longer needs to be resumed.",
    "The base model and the tokenizer are assumed public: what was learnt from other data before is not covered.",
    "Each further run on the same users spends further budget, as does choosing between runs by their results.",
    "Information leaked by the time or memory of the computation, and access to the machine while it runs.",
)
PRE_PROCESSING = (
    "before the data was passed in: unknown, and not covered unless it processed each user's data separately"
)


class PrivateSession:
    """The private parts of a run, for an adapter to plug into its trainer.

    Args:
        model: the model to train.
        users: the data.
        epsilon: ε of the whole run.
        delta: δ of the whole run; by default 1 / (10 · users).
        batch_size: the expected number of users per step.
        steps: maximum number of steps; if fewer are taken, less is spent.
        clipping: the clip function: `normalize(C)` or `clip(C)`.
        unit: the unit of privacy in the statement: user, author, document. By default user if `users` were grouped by
            a column of ids, and example otherwise: whether an item of the data set is all of a person is not known.
        keys: the folder for the keys of the run.
        data: sentences on the data for the statement, without counts.
        seed: for tests only: marks the run as not private.
    """

    def __init__(
        self,
        model: nn.Module,
        users: Users,
        *,
        epsilon: float,
        delta: float | None = None,
        batch_size: int,
        steps: int,
        clipping: ClipFunction | None = None,
        unit: str | None = None,
        keys: Path,
        data: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        if batch_size > len(users):
            raise DpformerError(
                f"the expected batch is {batch_size} users, but there are {len(users)}: reduce the batch"
            )
        self.model, self.users, self.epsilon_target, self.steps = model, users, epsilon, steps
        self.delta = 1 / (10 * len(users)) if delta is None else delta
        self.batch_size, self.clip = batch_size, clipping or normalize(1.0)
        self.unit = unit_of(unit or ("user" if users.grouped else "example"))
        self.data, self.seed, self.keys = list(data), seed, keys
        self.sample_rate = batch_size / len(users)
        self.noise_multiplier = calibrate(epsilon=epsilon, delta=self.delta, sample_rate=self.sample_rate, steps=steps)
        self.clipping, self._check = PhantomClipping(model), UsersCheck(model)
        self.batches = PoissonBatches(len(users), self.sample_rate, steps, seed=seed)
        self._masks: dict[str, Any] = SecureRandom("masks", seed=seed).state_dict()
        self.optimizer: VaultOptimizer | None = None
        self._place = (0, 0)  # step, and number of its parts so far
        self._batch: Batch | None = None  # the batch of the current step
        self.know_weights()

    def make_optimizer(self, inner: torch.optim.Optimizer, facts: str = "") -> VaultOptimizer:
        """The optimizer that adds the noise, wrapping any other. A resumed run must agree on `facts`."""
        if isinstance(inner, VaultOptimizer):
            return inner
        trained = {id(parameter) for parameter in self.model.parameters()}
        if any(id(p) not in trained for group in inner.param_groups for p in group["params"]):
            raise DpformerError("the optimizer has parameters outside the model: create it from model.parameters()")
        data = self.users.digest()
        self.context = f"{self.clip!r} {facts} {data}"  # identifies the noise
        self.optimizer = VaultOptimizer(
            inner,
            batches=self.batches,
            vault=Vault(self.keys),
            run=secrets.token_hex(16),
            data=data,
            masks=self._masks,
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip.clip_norm,
            expected_batch_size=self.batches.expected_batch_size,
            context=self.context,
            seed=self.seed,
        )
        self.optimizer.due, self.optimizer.after_step = self._due, self._after_step
        self.optimizer.after_load = self.know_weights  # trainers restore models before optimizers
        return self.optimizer

    def logical_batches(self, collate: Collate, rows: int, pad_token: int = 0) -> LogicalBatches:
        """Maps a step to its users, collated individually."""
        return LogicalBatches(self.users, self.batches, collate, rows, partial(self._seed, "collator"), pad_token)

    def add(self, losses_of: LossesOf, part: Part, device: torch.device | None = None) -> Tensor:
        """Add the clipped sum of a part's users to `p.grad`; returns their losses, which are private.

        Before that, `dp.check` tests whether losses depend on other users, at the first part and at random later.
        """
        if self._batch is None or self._batch.step != self.taken:
            raise DpformerError(
                "no batch is due: parts must belong to the batch that the data loader yielded for this step"
            )
        if not part.drawn:
            raise DpformerError(
                "this part was made by hand, so it may hold other users' data than it names: use the parts of the "
                "batch as they are"
            )
        users = self._batch.part(torch.tensor(part.who, dtype=torch.int64))
        self._check(losses_of, part)
        with self._masks_drawn(device):
            self.clipping.accumulate(lambda one: _one_loss(losses_of(one)), part, self.clip, users)
        return self.clipping.losses

    @contextmanager
    def _masks_drawn(self, device: torch.device | None = None) -> Iterator[None]:
        """The forward pass of a part of the step, whose dropout masks are secret."""
        if self._place[0] != self.taken:
            self._place = (self.taken, 0)
        seed = self._seed("dropout", *self._place)
        self._place = (self.taken, self._place[1] + 1)
        with drawing_from(seed, device):
            yield

    def due(self, batch: LogicalBatch) -> LogicalBatch:
        """The batch, if its step is the next one."""
        if not isinstance(batch, LogicalBatch):
            raise DpformerError("the data loader yields no batches of users: do not replace it")
        if batch.step != self.taken:
            raise DpformerError(
                f"got the batch of step {batch.step + 1} instead of that of step {self.taken + 1}; each batch is one "
                "step, in order: do not change the data loader, and step once after each batch"
            )
        if self._batch is None or self._batch.step != batch.step:
            self._batch = self.batches.batch(batch.step)
        return batch

    def _due(self) -> Batch:
        """The batch of the step; refused if a trainer takes a step without calling this session."""
        if self._batch is None or self._batch.step != self.taken:
            raise DpformerError(
                f"step {self.taken + 1} is due, but its batch of users was never passed in: a training step that does "
                "not call ours trains on pure noise; do not override it, or call super()"
            )
        return self._batch

    def _after_step(self) -> None:
        self._batch = None
        self.know_weights()

    def _seed(self, purpose: str, step: int, stream: int) -> int:
        """A secret seed; looked up when used, since resuming replaces the secret."""
        random = SecureRandom("masks", key=bytes.fromhex(self._masks["key"])).within(purpose)
        return int(random.words(1, step=step, stream=stream)[0] >> np.uint64(1))

    def know_weights(self) -> None:
        """Record that the current weights came from private steps."""
        self._versions = [parameter._version for parameter in self.model.parameters()]

    def check_weights(self) -> None:
        """Raise if anything but a private step has changed the weights since."""
        if self._versions != [parameter._version for parameter in self.model.parameters()]:
            raise DpformerError(
                "the weights were changed after the last private step, so their privacy is unknown: save before that, "
                "or train with the private optimizer only"
            )

    @property
    def taken(self) -> int:
        """The number of steps so far."""
        return 0 if self.optimizer is None else self.optimizer.steps

    @property
    def ledger(self) -> Ledger:
        """Everything done so far."""
        return Ledger([] if self.optimizer is None else self.optimizer.events())

    def epsilon(self) -> float:
        """ε spent so far."""
        return self.ledger.epsilon(self.delta) if self.taken else 0.0

    def statement(self) -> dict[str, Any]:
        """The statement about the current model, for privacy.json; refused if other than private steps changed it."""
        if self.taken:
            self.check_weights()
        facts = statement(
            self.ledger,
            delta=self.delta,
            target=self.epsilon_target,
            clipping="clip" if isinstance(self.clip, clip) else "normalize",
            clip_norm=self.clip.clip_norm,
            expected_batch_size=self.batches.expected_batch_size,
            users=len(self.users),
            seeded=self.seed is not None,
            data=[*self.data, f"The number of {self.unit.plural}, N = {len(self.users):,}, is assumed public."],
            hashes={},
            unit=self.unit,
        )
        answers = {**facts[sp800_226.NAME], "pre_processing": PRE_PROCESSING}
        return {**facts, sp800_226.NAME: answers, "not_covered": list(NOT_COVERED)}


def _one_loss(losses: Tensor) -> Tensor:
    if losses.shape != (1,):
        raise DpformerError(
            f"one user's part must give one loss, shape (1,), got shape {tuple(losses.shape)}: average each user's own "
            "values, with part.mean"
        )
    return losses
