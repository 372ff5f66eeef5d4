"""The clipped sum of some users' gradients, in micro-batches: for the trainer, other processes and the audit.

    p.grad ← Σ_i c_i g_i        over all users that were added, whatever the micro-batches

Micro-batches are added in float64, in which the order does not matter: the sum is the same whichever process computes
them. (The noise of a step is addressed by its sum, so a single different bit changes all noise.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.clipping import ClipFunction, PhantomClipping
from dpformer.clipping.bounded_sum import Addend, joint_bound, put_bounded, sum_of
from dpformer.errors import DpformerError
from dpformer.models import Batch
from dpformer.models.batch import padded
from dpformer.sampling import batch as sampling
from dpformer.training.microbatches import cut, positions_at_once

Totals = list[Tensor | None]  # of each trainable parameter, float64; None: nothing was added
Histories = Sequence[np.ndarray] | Mapping[int, np.ndarray]  # by position in the batch, longest first


class Model(Protocol):
    """A module that returns one loss per user of a batch."""

    max_length: int

    def __call__(self, batch: Batch) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """Statistics of a micro-batch, for metrics. Private, like the data."""

    losses: Tensor  # (B,) losses of users with a target
    norms: Tensor | None  # (B,) norms of all users
    rows: slice  # their positions in the batch


class GradientSum:
    """Adds users' gradients; `put` passes the sum to the optimizer.

    Args:
        model: returns one loss per user of a `Batch`.
        clip: bounds each user's gradient; None: plain gradients, without privacy.
        tokens: maximum positions of a micro-batch; lowered if memory runs out.
        bf16: forward passes under autocast; weights, norms, factors and sums stay in the precision of the weights. How
            a row is rounded depends on its padded length, so each row is padded by its own length alone.
    """

    def __init__(self, model: nn.Module, clip: ClipFunction | None, tokens: int, bf16: bool = False) -> None:
        self.model, self.clip, self.tokens, self.bf16 = model, clip, tokens, bf16
        self.clipping = PhantomClipping(model, check_users=2)  # `prove` looks at two
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.totals: Totals = [None] * len(self.parameters)

    @property
    def max_length(self) -> int:
        return cast(Model, self.model).max_length

    @property
    def skipped_users(self) -> int:
        """Number of users so far whose gradient was not finite; they contribute nothing."""
        return self.clipping.skipped_users

    def add(
        self,
        histories: Histories,
        micro_batches: Sequence[slice] | None = None,
        seed: Callable[[int], int] | None = None,
    ) -> list[Part]:
        """Add the gradients of users, given their histories.

        A micro-batch that does not fit into memory is halved, as are later ones; what it had already added is
        discarded, so that no user counts twice.

        Args:
            histories: items of each user in order of time, longest history first.
            micro_batches: positions of `histories` that go together; by default as many as `tokens` allows.
            seed: dropout seed for the micro-batch at an offset; by default torch's generator continues.
        """
        self.model.train()
        waiting = deque(self.cut(histories) if micro_batches is None else micro_batches)
        parts: list[Part] = []
        while waiting:
            rows = waiting.popleft()
            if seed is not None:
                torch.manual_seed(seed(rows.start))
            try:
                parts.append(self._add([histories[place] for place in range(rows.start, rows.stop)], rows))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._collect(keep=False)
                waiting.extendleft(reversed(self._halve(rows, histories)))
            else:
                self._collect(keep=True)
        return parts

    def cut(self, histories: Histories) -> list[slice]:
        """The micro-batches of all users of a step."""
        lengths = np.array([max(0, len(histories[place]) - 1) for place in range(len(histories))], dtype=np.int64)
        if self.bf16:
            return cut(padded(lengths, self.max_length), self.tokens, apart=True)
        return cut(lengths, self.tokens)

    def put(self, users: sampling.Part, added: Sequence[Part], totals: Totals | None = None) -> None:
        """`p.grad` ← the sum, for the optimizer, with its users; afterwards the sum is empty.

        Args:
            users: users of the step, in the order of `histories`.
            added: the micro-batches in the sum.
            totals: totals of several processes; by default of this one.
        """
        totals = self.totals if totals is None else totals
        if self.clip is not None:
            if added and all(total is None for total in totals):  # users with zero gradients are in it too
                totals = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p in self.parameters]
            addends = [Addend(users[part.rows], self.clipping.self_check) for part in added]
            put_bounded(self.parameters, totals, self.clip.clip_norm, addends)
        else:
            for p, total in zip(self.parameters, totals, strict=True):
                p.grad = None if total is None else total.to(p.dtype)
        self.clear()

    def clear(self) -> None:
        """Discard everything added so far."""
        self.totals = [None] * len(self.parameters)

    def prove(self, num_items: int) -> None:
        """Let the engine check itself on two synthetic users, which takes memory, and a batch of two takes little."""
        generator = np.random.default_rng(0)
        self.add(list(generator.integers(0, num_items, (2, self.max_length + 1))))
        self.clear()
        for p in self.parameters:
            p.grad = None

    def _add(self, histories: list[np.ndarray], rows: slice) -> Part:
        batch = Batch.from_histories(histories, self.max_length)
        batch = (batch.alike(self.max_length) if self.bf16 else batch).to(self.parameters[0].device)
        with_target = batch.lengths > 0
        autocast = torch.autocast(self.parameters[0].device.type, torch.bfloat16, enabled=self.bf16)
        if self.clip is None:
            with autocast:
                losses = self.model(batch)
            losses.sum().backward()
            return Part(losses.detach()[with_target].cpu(), None, rows)

        def loss_of(user: Batch) -> Tensor:
            with autocast:
                return cast(Tensor, self.model(user))

        norms = self.clipping.accumulate(loss_of, batch, self.clip)
        return Part(self.clipping.losses[with_target].cpu(), norms[: len(histories)].cpu(), rows)

    def _collect(self, keep: bool) -> None:
        """Move `p.grad` into the totals, or discard it; zeros remain."""
        if keep and self.clip is not None and joint_bound(self.parameters) > self.clip.clip_norm:
            raise AssertionError(f"gradients were clipped to more than {self.clip.clip_norm}")
        for i, p in enumerate(self.parameters):
            added = sum_of(p)
            if p.grad is None or added is None:
                continue
            if keep:
                total = self.totals[i]
                self.totals[i] = added.to(torch.float64, copy=True) if total is None else total.add_(added)
            p.grad.zero_()

    def _halve(self, rows: slice, histories: Histories) -> list[slice]:
        if rows.stop - rows.start == 1:
            raise DpformerError(
                f"out of memory for a single user with {len(histories[rows.start]):,} items: lower --max-length or "
                "--dim"
            )
        self.tokens = max(1, self.tokens // 2)
        middle = (rows.start + rows.stop) // 2
        return [slice(rows.start, middle), slice(middle, rows.stop)]


def tokens_for(model: nn.Module, most: int, num_items: int) -> int:
    """Positions of a recommender to compute at once: at most `most`, fewer if the engine keeps more per position."""
    encoder = sum(p.numel() for p in model.parameters() if p.requires_grad and p.shape[:1] != (num_items,))
    return positions_at_once(most, num_items, encoder, cast(Model, model).max_length)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or NumPy says that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in ("out of memory", "not enough memory", "can't allocate memory"))
