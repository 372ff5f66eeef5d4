"""Several processes, on one machine or many: one leads, the others compute gradients for it.

    leader      draws the batch and splits it into micro-batches, as it would alone; distributes them with the weights
    all         add the clipped gradients of their own micro-batches; zero without any
    leader      adds the sums, adds the noise, takes the step

So batch, micro-batches, dropout and model are those of a single process, whatever the number of processes: sums are in
float64, in which the order of additions does not show. Noise is added exactly once because only one process holds its
key: two processes that each add a part would have to be accounted for differently, and two that add the same noise
would have to agree to the last bit. No process skips a step: one without users contributes a sum of zero.

The data stay with the leader, which reads the file and writes the run folder; the others see the histories they work on
and keep no state. If prepared data is on a disk that others can see, they receive user numbers instead and read only
the histories of their own micro-batches. So a job that lost a process is resumed from the leader's checkpoint alone,
with any number of processes. Traffic is unencrypted and contains histories and sums without noise: use a private
network.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpformer.clipping import ClipFunction
from dpformer.clipping.bounded_sum import Addend, Addends, addends_of, joint_bound, put_bounded, sum_of
from dpformer.errors import DpformerError
from dpformer.noise import SecureRandom
from dpformer.sampling import batch as sampling
from dpformer.training.gradient_sum import GradientSum, Part, Totals
from dpformer.training.rendezvous import check_gpus, join_processes, together
from dpformer.training.trainer import Trainer, torch_seed


class Stored(Protocol):
    """Prepared data on disk, as seen by a process that reads its own share."""

    def train(self, user: int) -> np.ndarray: ...


Open = Callable[[], Stored]


@dataclass
class Team:
    """The processes of a job, from the point of view of one of them."""

    rank: int
    size: int
    again: bool = False  # torchrun has restarted the job
    busy: bool = False  # work is distributed and not yet collected, so no process listens
    readers: frozenset[int] = frozenset()  # processes that read histories themselves

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # The leader.

    def enlist(
        self, trainer: Trainer, build: Callable[[], nn.Module], device: str | None = None, store: Open | None = None
    ) -> None:
        """Tell the others which model to build, and join the trainer.

        Args:
            trainer: of the leader.
            build: makes the model; picklable.
            device: of the model.
            store: opens prepared data on disk (DpformerError if it is not visible); picklable. Without it, and for
                processes
                that cannot see it, histories are sent.
        """
        check_gpus(device)
        state = {name: tensor.cpu() for name, tensor in trainer.model.state_dict().items()}  # others have other GPUs
        key = bytes.fromhex(str(trainer.dropout.state_dict()["key"]))
        work = Work(build, state, trainer.sum.clip, key, torch.get_num_threads(), trainer.sum.bf16, store)
        self._tell([("enlist", work)] * self.size)
        answers: list[Any] = [None] * self.size
        with together(self.rank):
            dist.gather_object(False, answers, dst=0)
        self.readers = frozenset(rank for rank, reads in enumerate(answers) if reads)
        trainer.team = self

    def add_gradients(self, trainer: Trainer, users: sampling.Part) -> list[Part]:
        """Distribute micro-batches of users, longest history first, and add the results to `p.grad`."""
        histories = trainer.users.histories(users.users.numpy())
        own = trainer.sum
        micro_batches = own.cut(histories)
        shares = [micro_batches[rank :: self.size] for rank in range(self.size)]
        self.busy = True
        dealt = (users.users.tolist() if rank in self.readers else histories for rank in range(1, self.size))
        self._tell([None, *(_share(trainer, what, share) for what, share in zip(dealt, shares[1:], strict=True))])
        self._send_weights(own.parameters)
        before = own.skipped_users
        parts = own.add(histories, shares[0], trainer.dropout_seed)
        totals, reports = self._bring_back(own, Report(parts, own.skipped_users - before, own.tokens))
        self.busy = False
        everywhere = [part for report in reports for part in report.parts]
        own.put(users, everywhere, totals)
        own.tokens = min(report.tokens for report in reports)  # a size that did not fit is not used again
        own.clipping.skipped_users = before + sum(report.skipped for report in reports)
        return everywhere

    def dismiss(self) -> None:
        """Tell the others to stop. If they are busy, they will notice that the leader has gone."""
        if self.size > 1 and not self.busy:
            with contextlib.suppress(DpformerError):
                self._tell([("done",)] * self.size)
        dist.destroy_process_group()

    # The other processes.

    def follow(self) -> None:
        """Work for the leader until told to stop. The leader handles signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        work: GradientSum | None = None
        stored: Stored | None = None
        dropout = SecureRandom("dropout")
        while (message := self._hear())[0] != "done":
            if message[0] == "enlist":
                work, dropout = message[1].begin()
                stored = message[1].open_store()
                with together(self.rank):
                    dist.gather_object(stored is not None, None, dst=0)
                continue
            assert work is not None
            _, step, work.tokens, micro_batches, histories = message
            if stored is not None:
                histories = {place: stored.train(user) for place, user in histories.items()}
            self._send_weights(work.parameters)
            before = work.skipped_users
            parts = work.add(histories, micro_batches, partial(torch_seed, dropout, step))
            self._bring_back(work, Report(parts, work.skipped_users - before, work.tokens))
            work.clear()
        dist.destroy_process_group()

    # Communication.

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

    def _bring_back(self, own: GradientSum, report: Report) -> tuple[Totals, list[Report]]:
        """To the leader: the sum of all totals, and all reports."""
        flat = _flat(own.parameters, own.totals)
        reports: list[Any] | None = [None] * self.size if self.leads else None
        with together(self.rank):
            dist.reduce(flat, dst=0)
            dist.gather_object(report, reports, dst=0)
        return [values for _, values in _pieces(own.parameters, flat)], reports or []


@dataclass(frozen=True)
class Work:
    """What another process needs to start: how to build the model, its state, the bound, the key of dropout."""

    build: Callable[[], nn.Module]
    state: dict[str, Tensor]
    clip: ClipFunction | None
    dropout_key: bytes
    threads: int
    bf16: bool
    store: Open | None = None

    def begin(self) -> tuple[GradientSum, SecureRandom]:
        torch.set_num_threads(self.threads)
        model = self.build()
        model.load_state_dict(self.state)
        return GradientSum(model, self.clip, tokens=1, bf16=self.bf16), SecureRandom("dropout", key=self.dropout_key)

    def open_store(self) -> Stored | None:
        """The prepared data, if this process sees it and it equals the leader's."""
        if self.store is not None:
            with contextlib.suppress(DpformerError):
                return self.store()
        return None


@dataclass(frozen=True)
class Report:
    """A process's report on its share of a step. As private as the data."""

    parts: list[Part]
    skipped: int
    tokens: int


def _share(trainer: Trainer, dealt_out: Sequence[Any], micro_batches: list[slice]) -> Any:
    """Histories by position in the batch: only processes that read them learn which users they are."""
    dealt = {place: dealt_out[place] for rows in micro_batches for place in range(rows.start, rows.stop)}
    return ("work", trainer.step, trainer.sum.tokens, micro_batches, dealt)


def start_team() -> Team | None:
    """Join the processes started by torchrun; None if there is only this one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        return None
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    again = join_processes("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return Team(dist.get_rank(), size, again)


def _flat(parameters: Sequence[Tensor], totals: Totals) -> Tensor:
    """All totals as one vector; None counts as zero."""
    zeros = (torch.zeros_like(p, dtype=torch.float64) for p in parameters)
    return torch.cat([(z if t is None else t).flatten() for z, t in zip(zeros, totals, strict=True)])


def _pieces(parameters: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with its part of the flat vector."""
    start = 0
    for p in parameters:
        yield p, flat[start : start + p.numel()].view(p.shape)
        start += p.numel()


# For custom training loops.


def shared_key() -> bytes:
    """32 secret bytes, the same in every process: for `PoissonBatches(key=…)` and `PrivateOptimizer(key=…)`."""
    key: list[Any] = [os.urandom(32) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(key, src=0)
    return cast(bytes, key[0])


def add_up_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum `p.grad` over all processes, in all of them; None counts as zero. Call it before `optimizer.step()`.

    With the same key in every `PrivateOptimizer`, all processes then add the same noise to the same sum, so it is
    included
    once: never divide it between processes, and never let each draw its own.
    """
    trainable = [p for p in parameters if p.requires_grad]
    clip_norm, addends = bound_everywhere(trainable)
    totals: list[Tensor | None] = []
    for p in trainable:
        dtype, own = torch.promote_types(p.dtype, torch.float32), sum_of(p)
        total = torch.zeros_like(p, dtype=dtype) if own is None else own.detach().to(dtype, copy=True)
        dist.all_reduce(total)
        totals.append(total)
    put_bounded(trainable, totals, clip_norm, addends)


def bound_everywhere(parameters: Sequence[Tensor]) -> tuple[float, Addends]:
    """C of the gradients in all processes, and their users; if one refuses, all do, so that none waits in vain."""
    answers: list[Any] = [None] * dist.get_world_size()
    try:
        answer: Any = (
            joint_bound(parameters),
            [(_named(addend.part), addend.self_checked) for addend in addends_of(parameters)],
        )
    except ValueError as error:
        answer = str(error)
    dist.all_gather_object(answers, answer)
    for rank, given in enumerate(answers):
        if isinstance(given, str):
            raise ValueError(f"in process {rank}, {given}")
    addends = tuple(Addend(_part(named), checked) for _, held in answers for named, checked in held)
    return max(bound for bound, _ in answers), addends


Named = tuple[Tensor, int, sampling.Origin] | None  # a part as it is sent


def _named(part: sampling.Part | None) -> Named:
    return None if part is None else (part.users, part.batch.step, part.batch.origin)


def _part(named: Named) -> sampling.Part | None:
    if named is None:
        return None
    users, step, origin = named
    return sampling.Batch(users.sort().values, step, origin).part(users)
