"""One step after the other: users by chance → micro-batches → clipped sum → noise, once → Adam.

    p.grad = Σ_{i in the batch} c_i g_i          (`_sum_gradients`, a sum over users whatever the micro-batches)
    p ← Adam(p, (p.grad + σC·N(0, I)) / B)        (`PrivateOptimizer`, B the *expected* batch size)

A step is a function of the state before it: the sampler and the noise have their own resumable streams, the learning
rate depends on the step alone, and dropout on (key, step, place of the micro-batch). So a run continues from any
checkpoint to the same model, bit for bit.

Several processes share the micro-batches of a step, and `p.grad` is the sum of theirs (`distributed`); nothing else
changes.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping import ClipFunction, PhantomClipping, clip, normalize
from dpformer.data.dataset import Dataset
from dpformer.errors import DpformerError
from dpformer.models import Batch, SequenceModel
from dpformer.privacy import Ledger, PoissonBatches, SecureRandom
from dpformer.runs.config import Config
from dpformer.runs.start import torch_seed
from dpformer.training.microbatches import by_length, cut, positions_at_once
from dpformer.training.optimizer import PrivateOptimizer
from dpformer.training.plan import Plan
from dpformer.training.schedule import average_weight, warmup_then_decay

if TYPE_CHECKING:
    from dpformer.training.distributed import Team


Totals = list[Tensor | None]  # of each trainable parameter, float64; None: nothing was added


@dataclass(frozen=True)
class Part:
    """What a micro-batch tells about itself, for metrics. Private, like the data."""

    losses: Tensor  # (B,) of users with a target
    norms: Tensor | None  # (B,) of all users


class Trainer:
    """The state of a run between two steps, and the step."""

    def __init__(
        self, config: Config, plan: Plan, dataset: Dataset, model: SequenceModel, random: SecureRandom
    ) -> None:
        assert config.max_length is not None
        self.config, self.plan, self.dataset, self.model = config, plan, dataset, model
        # A key of its own, which other processes may have: it is derived from the run's secret and does not tell it.
        self.dropout = SecureRandom("dropout", key=random.within("dropout").words(4, step=0).tobytes())
        self.team: Team | None = None  # other processes
        self.step = 0
        self.max_length = config.max_length
        self.widths = np.maximum(dataset.train_lengths - 1, 0)  # (users,) positions with a target
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        encoder = sum(p.numel() for p in self.parameters if p.shape[:1] != (dataset.num_items,))
        self.tokens = positions_at_once(config.micro_batch_tokens, dataset.num_items, encoder, config.max_length)
        self.average = [p.detach().clone() for p in self.parameters] if config.average else None
        self.batches = PoissonBatches(plan.users, plan.sample_rate, plan.steps, bands=plan.bands, seed=config.seed)
        self.optimizer = self._optimizer()
        self.clipping = PhantomClipping(model)
        bound: type[normalize] | type[clip] = normalize if config.clipping == "normalize" else clip
        self.clip: ClipFunction = bound(plan.clip_norm)
        if config.private:
            self._prove()

    def _optimizer(self) -> PrivateOptimizer:
        c = self.config
        adam = torch.optim.Adam(self.parameters, lr=c.learning_rate, weight_decay=c.weight_decay, foreach=True)
        return PrivateOptimizer(
            adam,
            noise_multiplier=self.plan.noise_multiplier,
            clip_norm=self.plan.clip_norm,
            expected_batch_size=self.plan.expected_batch_size,
            bands=self.plan.bands,
            context=f"config {c.hash()} data {self.dataset.hash}",
            seed=c.seed,
        )

    @property
    def ledger(self) -> Ledger:
        """What has touched the data so far."""
        return Ledger([*self.plan.others, self.optimizer.event(self.batches)])

    def _prove(self) -> None:
        """Lets the engine prove itself on two made-up users: that takes memory, and of two little."""
        generator = np.random.default_rng(0)
        histories = list(generator.integers(0, self.dataset.num_items, (2, self.max_length + 1)))
        self.model.train()
        with self.clipping:
            losses = self.model(Batch.from_histories(histories, self.max_length).to(self.parameters[0].device))
        self.clipping.backward(losses, self.clip)
        for p in self.parameters:
            p.grad = None

    # The step.

    def advance(self) -> dict[str, Any]:
        """Takes one step and returns its record for metrics.jsonl."""
        began = time.monotonic()
        users = self.batches.batch(self.step)
        parts = self._sum_gradients(by_length(users, self.widths))
        rate = self.config.learning_rate * warmup_then_decay(self.step, self.plan.steps, self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._update()
        self.step += 1
        return self._record(len(users), parts, rate, time.monotonic() - began)

    def measure(self, users: np.ndarray) -> float:
        """Seconds that the gradients of these users take; the state stays as it is."""
        began = time.monotonic()
        self._sum_gradients(by_length(users, self.widths))
        self.optimizer.zero_grad(set_to_none=True)
        return time.monotonic() - began

    def _update(self) -> None:
        try:
            self.optimizer.step()
        except ValueError as error:
            if self.config.private:  # the sum holds finite users only
                raise
            raise DpformerError(f"training without clipping has diverged ({error}): lower --learning-rate") from None
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            weight = average_weight(self.step, self.plan.steps)
            for mean, p in zip(self.average, self.parameters, strict=True):
                mean.lerp_(p.detach(), weight)

    def _sum_gradients(self, users: np.ndarray) -> list[Part]:
        """Adds the (clipped) gradients of the users, the longest first, to `p.grad`."""
        rows = cut(self.widths[users], self.tokens)
        if self.team is not None:
            return self.team.sum_gradients(self, users, rows)
        parts, totals = self.add_rows(users, rows)
        for p, total in zip(self.parameters, totals, strict=True):
            _put(p, total)
        return parts

    def add_rows(self, users: np.ndarray, slices: list[slice]) -> tuple[list[Part], Totals]:
        """The sum of the gradients of some slices of the users, a micro-batch each, and of what was in `p.grad`.

        Micro-batches are added up in float64, in which the order does not matter: whoever computes them, the sum comes
        out the same. (The noise of a step is addressed by its weights, so after one different bit all noise differs.)
        A micro-batch that does not fit into memory is halved, and so are those of later steps; what it had already
        added is dropped, so that no user counts twice.
        """
        self.model.train()
        parts: list[Part] = []
        totals: Totals = [None] * len(self.parameters)
        self._collect(totals)
        rows = deque(slices)
        while rows:
            row = rows.popleft()
            try:
                parts.append(self._add_gradients(users[row], row.start))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._collect(None)
                rows.extendleft(reversed(self._halve(row, users)))
            else:
                self._collect(totals)
        return parts, totals

    def _collect(self, totals: Totals | None) -> None:
        """Moves `p.grad` into the totals, or drops it; what stays is zero, and still carries its sensitivity."""
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            if totals is not None:
                total = totals[i]
                totals[i] = p.grad.to(torch.float64, copy=True) if total is None else total.add_(p.grad)
            p.grad.zero_()

    def _add_gradients(self, users: np.ndarray, place: int) -> Part:
        torch.manual_seed(torch_seed(self.dropout, self.step, place))
        batch = Batch.from_histories(self.dataset.histories(users), self.max_length).to(self.parameters[0].device)
        with_target = batch.lengths > 0
        if not self.config.private:
            losses = self.model(batch)
            losses.sum().backward()
            return Part(losses.detach()[with_target].cpu(), None)
        with self.clipping:
            losses = self.model(batch)
        norms = self.clipping.backward(losses, self.clip)
        return Part(losses.detach()[with_target].cpu(), norms.cpu())

    def _halve(self, row: slice, users: np.ndarray) -> list[slice]:
        if row.stop - row.start == 1:
            raise DpformerError(
                f"memory does not suffice for one user of {int(self.widths[users[row]][0]) + 1:,} items: "
                "lower --max-length or --dim"
            )
        self.tokens = max(1, self.tokens // 2)
        middle = (row.start + row.stop) // 2
        return [slice(row.start, middle), slice(middle, row.stop)]

    def _record(self, users: int, parts: list[Part], rate: float, seconds: float) -> dict[str, Any]:
        losses = torch.cat([part.losses for part in parts]) if parts else torch.zeros(0)
        norms = torch.cat([part.norms for part in parts if part.norms is not None] or [torch.zeros(0)])
        losses, norms = losses[losses.isfinite()], norms[norms.isfinite()]
        spent = self.plan.spent(self.step)
        return {
            "step": self.step,
            "epoch": round(self.step * self.plan.sample_rate, 4),
            "loss": float(losses.mean()) if len(losses) else None,
            "median_norm": float(norms.median()) if len(norms) else None,
            "users": users,
            "skipped_users": self.clipping.skipped_users,
            "learning_rate": rate,
            "epsilon": spent if np.isfinite(spent) else None,
            "micro_batch_tokens": self.tokens,
            "seconds": round(seconds, 4),
        }

    # The state.

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "skipped_users": self.clipping.skipped_users,
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.state_dict(),
            "average": self.average,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes back to a state."""
        self.step, self.tokens = state["step"], state["tokens"]
        self.clipping.skipped_users = state["skipped_users"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["batches"])
        if state["average"] is not None:
            self.average = [m.to(p.device) for m, p in zip(state["average"], self.parameters, strict=True)]

    def released(self) -> SequenceModel:
        """The model to release: the last iterate or the average, as the config fixed before the run."""
        model = copy.deepcopy(self.model).eval()
        if self.average is not None:
            with torch.no_grad():
                for p, mean in zip((p for p in model.parameters() if p.requires_grad), self.average, strict=True):
                    p.copy_(mean)
        return model


def _put(parameter: Tensor, total: Tensor | None) -> None:
    """`p.grad` ← total, in place where it is there: it carries its sensitivity."""
    if total is not None and parameter.grad is not None:
        parameter.grad.copy_(total)
    elif total is not None:
        parameter.grad = total.to(parameter.dtype)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or numpy says that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in ("out of memory", "not enough memory", "can't allocate memory"))
