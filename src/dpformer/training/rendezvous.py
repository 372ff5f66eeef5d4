"""How the processes started by torchrun find each other, initially or after a restart."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from dpformer.errors import DpformerError

ARRIVAL = timedelta(minutes=30)  # between the arrival of the first and the last process
PATIENCE = timedelta(hours=6)  # while the leader reads data or evaluates; a process that ends is noticed immediately


def join_processes(backend: str) -> bool:
    """`dist.init_process_group` for torchrun processes; returns whether the job was restarted, on the first one.

    torchrun keeps one key-value store for all restarts of a job, and torch writes the same keys each time: a restarted
    process finds the addresses of dead ones there, and contacts them forever (pytorch/pytorch#135712). Counting
    restarts does not help, because machines count differently. So the processes first agree on a new prefix for
    everything they write.
    """
    rank = int(os.environ["RANK"])
    with together(rank):
        store, rank, size = next(dist.rendezvous("env://", timeout=ARRIVAL))
        ours = dist.PrefixStore("dpformer", store)
        starts = ours.add("starts", rank == 0)
        own = dist.PrefixStore(_agree_on_name(ours, rank, size), store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=PATIENCE)
    return starts > 1 or restarted()


def _agree_on_name(store: dist.Store, rank: int, size: int) -> str:
    """A name chosen by the first process. Others request it under a name of their own, and confirm.

    So nothing that former processes left behind is taken for an answer: their requests are answered too, but dead
    processes do not confirm.
    """
    me = os.urandom(16).hex()
    if rank > 0:
        store.set(f"question of {rank}", me)
        name = store.get(f"answer to {me}").decode()  # waits
        store.set(f"{name} has {rank}", "")
        return name
    others, until = range(1, size), time.monotonic() + ARRIVAL.total_seconds()
    while missing := [other for other in others if not store.check([f"{me} has {other}"])]:
        if time.monotonic() > until:
            raise RuntimeError(f"process {missing[0]} did not arrive within {ARRIVAL}")
        for other in missing:
            if store.check([f"question of {other}"]):
                store.set("answer to " + store.get(f"question of {other}").decode(), me)
        time.sleep(0.02)
    return me


@contextlib.contextmanager
def together(rank: int) -> Iterator[None]:
    """Turn errors into a message that another process has gone; the state on disk is intact."""
    try:
        yield
    except RuntimeError as error:
        raise DpformerError(
            f"process {rank} stops because another process of this job has ended ({str(error).splitlines()[0][:120]}); "
            "restart the job with --resume RUN"
        ) from None


def restarted() -> bool:
    """Whether torchrun has restarted this machine's processes after one of them ended; other restarts do not count."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def check_gpus(device: str | None) -> None:
    """Refuses two processes on one GPU: NCCL cannot connect them."""
    if device is None or not device.startswith("cuda"):
        return
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if device != "cuda":
        raise DpformerError(f"device is {device!r}; with several processes each uses its own GPU: give --device cuda")
    if here > gpus:
        raise DpformerError(
            f"{here} processes on this machine have {gpus} GPUs: give --nproc-per-node {gpus}, or --device cpu"
        )
