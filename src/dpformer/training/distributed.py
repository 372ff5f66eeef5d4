"""Several processes, on one machine or many: one leads, the others compute gradients for it.

    leader      draws the batch and cuts it into micro-batches, as it would alone; deals them out, with the weights
    everybody   adds up the clipped gradients of its own micro-batches; without any, that is zero
    leader      adds the sums, adds the noise, takes the step

So batch, micro-batches and dropout are those of one process whatever the number of processes, and so is the model: sums
are in float64, in which the order of additions does not show. Noise is added exactly once because one process alone
holds its key: two that each add a part of it would have to be accounted for differently, and two that add the same
noise would have to agree to the last bit. Nobody skips a step: a process with an empty share takes part with a sum of
zero.

The data stay with the leader, who reads the file and writes the run folder; the others see the histories they work on
and keep no state. So a job that lost a process is resumed from the leader's checkpoint alone, with any number of
processes. Traffic is not encrypted and holds histories and sums without noise: it belongs on a private network.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpformer.data.dataset import Dataset
from dpformer.errors import DpformerError
from dpformer.models import SequenceModel
from dpformer.privacy import SecureRandom
from dpformer.runs.config import Config
from dpformer.runs.start import build_model
from dpformer.training.plan import Plan
from dpformer.training.rendezvous import check_gpus, join_processes, together
from dpformer.training.trainer import Part, Totals, Trainer


@dataclass
class Team:
    """The processes of a job, as one of them sees it."""

    rank: int
    size: int
    again: bool = False  # torchrun has started the job before
    busy: bool = False  # work is dealt out and not yet brought back: nobody listens
    build: Callable[..., SequenceModel] = build_model  # what the others make of the leader's config

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # What the leader does.

    def enlist(self, config: Config, plan: Plan, num_items: int, trainer: Trainer) -> None:
        """Tells the others which model to build, and joins the trainer."""
        check_gpus(config.device)
        key = bytes.fromhex(str(trainer.dropout.state_dict()["key"]))
        state = {name: tensor.cpu() for name, tensor in trainer.model.state_dict().items()}  # others have other GPUs
        self._tell([("enlist", config, plan, num_items, state, key)] * self.size)
        trainer.team = self

    def sum_gradients(self, trainer: Trainer, users: np.ndarray, rows: list[slice]) -> list[Part]:
        """Deals out micro-batches and adds up what comes back: `p.grad` is the sum over all of them."""
        shares = [rows[rank :: self.size] for rank in range(self.size)]
        self.busy = True
        self._tell([None, *(self._share(trainer, users, share) for share in shares[1:])])
        self._send_weights(trainer.parameters)
        before = trainer.clipping.skipped_users
        reports = self._bring_back(trainer, before, *trainer.add_rows(users, shares[0]))
        self.busy = False
        trainer.tokens = min(report.tokens for report in reports)  # what did not fit is not dealt out again
        trainer.clipping.skipped_users = before + sum(report.skipped for report in reports)
        for p in trainer.parameters:
            p.grad.sensitivity = max(report.sensitivity for report in reports)  # type: ignore[union-attr]
        return [part for report in reports for part in report.parts]

    def _share(self, trainer: Trainer, users: np.ndarray, rows: list[slice]) -> Any:
        """Positions in the batch, not users, name the histories: nobody else needs to know who it is."""
        histories = {at: trainer.dataset.train(users[at]) for row in rows for at in range(row.start, row.stop)}
        return ("work", trainer.step, trainer.tokens, trainer.widths[users], rows, histories)

    def dismiss(self) -> None:
        """Sends the others home. If they are at work they will notice that the leader has gone."""
        if self.size > 1 and not self.busy:
            with contextlib.suppress(DpformerError):
                self._tell([("done",)] * self.size)
        dist.destroy_process_group()

    # What the others do.

    def follow(self) -> None:
        """Works for the leader until sent home. Ctrl-C and SIGTERM are the leader's to answer."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        trainer: Trainer | None = None
        while (message := self._hear())[0] != "done":
            if message[0] == "enlist":
                trainer = _assistant(self.build, *message[1:])
                continue
            assert trainer is not None
            _, trainer.step, trainer.tokens, trainer.widths, rows, histories = message
            trainer.dataset = cast(Dataset, Share(histories))
            self._send_weights(trainer.parameters)
            before = trainer.clipping.skipped_users
            self._bring_back(trainer, before, *trainer.add_rows(np.arange(len(trainer.widths)), rows))
            trainer.optimizer.zero_grad(set_to_none=True)
        dist.destroy_process_group()

    # What goes over the wire.

    def _tell(self, messages: list[Any]) -> None:
        with together(self.rank):
            dist.scatter_object_list([None], messages, src=0)

    def _hear(self) -> Any:
        message: list[Any] = [None]
        with together(self.rank):
            dist.scatter_object_list(message, None, src=0)
        return message[0]

    @torch.no_grad()
    def _send_weights(self, parameters: Sequence[Tensor]) -> None:
        flat = torch.cat([p.detach().flatten() for p in parameters])
        with together(self.rank):
            dist.broadcast(flat, src=0)
        if not self.leads:
            for p, values in _pieces(parameters, flat):
                p.copy_(values)

    def _bring_back(self, trainer: Trainer, skipped_before: int, parts: list[Part], totals: Totals) -> list[Report]:
        """The sum of everybody's totals into the leader's `p.grad`, and reports from all."""
        parameters = trainer.parameters
        report = Report(
            parts,
            trainer.clipping.skipped_users - skipped_before,
            trainer.tokens,
            max((getattr(p.grad, "sensitivity", 0.0) for p in parameters), default=0.0),
        )
        zeros = (torch.zeros_like(p, dtype=torch.float64) for p in parameters)
        flat = torch.cat([(z if t is None else t).flatten() for z, t in zip(zeros, totals, strict=True)])
        reports: list[Any] | None = [None] * self.size if self.leads else None
        with together(self.rank):
            dist.reduce(flat, dst=0)
            dist.gather_object(report, reports, dst=0)
        if self.leads:
            for p, values in _pieces(parameters, flat):
                p.grad = values.to(p.dtype)
        return reports or []


@dataclass(frozen=True)
class Report:
    """What one process has to say about its share of a step. As private as the data."""

    parts: list[Part]
    skipped: int
    tokens: int
    sensitivity: float


class Share:
    """The histories one process works on in this step, in place of the data set."""

    hash = ""
    num_items = 1  # how much is computed at once is up to the leader
    train_lengths = np.zeros(0, dtype=np.int64)

    def __init__(self, histories: dict[int, np.ndarray]) -> None:
        self._histories = histories

    def histories(self, places: Iterable[int]) -> list[np.ndarray]:
        return [self._histories[int(place)] for place in places]


def start_team() -> Team | None:
    """Joins the processes that torchrun has started; None where there is only this one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        return None
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    again = join_processes("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return Team(dist.get_rank(), size, again)


def _assistant(
    build: Callable[..., SequenceModel],
    config: Config,
    plan: Plan,
    num_items: int,
    state: dict[str, Tensor],
    key: bytes,
) -> Trainer:
    """A trainer that only adds up gradients: weights and randomness come from the leader."""
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    random = SecureRandom("assistant")
    model = build(config, plan, num_items, None, random)
    model.load_state_dict(state)
    trainer = Trainer(config, plan, cast(Dataset, Share({})), model, random)
    trainer.dropout = SecureRandom(trainer.dropout.context, key=key)
    return trainer


def _pieces(parameters: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with its part of the flat vector."""
    start = 0
    for p in parameters:
        yield p, flat[start : start + p.numel()].view(p.shape)
        start += p.numel()


# For a training loop of your own.


def shared_key() -> bytes:
    """32 secret bytes, the same in every process: for `PoissonBatches(key=…)` and `PrivateOptimizer(key=…)`."""
    key: list[Any] = [os.urandom(32) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(key, src=0)
    return cast(bytes, key[0])


def add_up_gradients(parameters: Iterable[Tensor]) -> None:
    """`p.grad` ← its sum over all processes, in all of them; None counts as zero. Call it before `optimizer.step()`.

    With the same key in every `PrivateOptimizer` all processes then add the same noise to the same sum, so it is there
    once: never divide it among processes, and never let each draw its own.
    """
    trainable = [p for p in parameters if p.requires_grad]
    bounds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(bounds, max((getattr(p.grad, "sensitivity", 0.0) for p in trainable), default=0.0))
    for p in trainable:
        total = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        dist.all_reduce(total)
        p.grad = total
        p.grad.sensitivity = max(bounds)  # type: ignore[attr-defined]
