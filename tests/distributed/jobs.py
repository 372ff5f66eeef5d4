"""Jobs of several processes for tests: forked from a server that has imported everything once, joined on loopback."""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from dpformer.errors import DpformerError
from dpformer.runs.config import Config

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch.distributed.fsdp",
        "torch.distributed.launcher.api",
        "torch._dynamo",  # imported by the first optimizer of a process, in a second and more
        "dpformer.runs.run",
        "dpformer.training.distributed",
        "dpformer.verification.audit",
        "dpformer.verification.verify",
        "tests.training.memo",
        "dpformer.cli.train",
        "dp_accounting",
        "scipy.stats",
    ]
)


_held: list[socket.socket] = []


def own_port() -> int:
    """A port that the system gives to nobody else while this process lives: a socket is bound to it and never listens.

    A process that asks to reuse this port may listen there, as torch's store does.
    """
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind(("127.0.0.1", 0))
    _held.append(free)
    return int(free.getsockname()[1])


def start(size: int, target: Callable[..., None], *args: Any) -> list[ForkServerProcess]:
    """The processes of a job, each running `target(*args)` with its rank in the environment."""
    port = own_port()
    processes = [CONTEXT.Process(target=_enter, args=(rank, size, port, target, *args)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[ForkServerProcess], seconds: float = 300) -> list[int | None]:
    """Their exit codes; a process that does not end is an error."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.1, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert None not in codes, f"a process hangs: {codes}"
    return codes


def _enter(rank: int, size: int, port: int, target: Callable[..., None], *args: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        target(*args)
    except DpformerError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)


def train(config: Config, out: Path, known: dict[Any, float]) -> None:
    """What `dpformer train` does, or `--resume` if the folder is there. `known`: answers of the accountant."""
    import typer

    from dpformer.cli.train import run_or_exit
    from tests.training.memo import _known, remember

    remember()
    _known.update(known)
    try:
        run_or_exit(out if out.exists() else config, out)
    except typer.Exit as end:
        os._exit(end.exit_code)


def stay(step: int, leave: Path) -> None:
    """From now on a run of this process takes no more than so many steps before a file is there.

    So it is not over before a test stops it, however late that one comes.
    """
    from dpformer.training.trainer import Trainer

    advance = Trainer.advance

    def waiting(self: Trainer) -> Any:
        while self.step >= step and not leave.exists():
            time.sleep(0.01)
        return advance(self)

    Trainer.advance = waiting  # type: ignore[method-assign]


def leave_file(out: Path, restart: int | str = 0) -> Path:
    return out.with_name(f"leave-{restart}")


def train_and_stay(config: Config, out: Path, known: dict[Any, float]) -> None:
    """`train`, which stays before its last steps."""
    stay(20, leave_file(out))
    train(config, out, known)


def train_and_look(config: Config, out: Path, known: dict[Any, float]) -> None:
    """The others look at what they have: the histories of their own micro-batches, of this step, and no data set."""
    from dpformer.data import Dataset
    from dpformer.training.distributed import Team

    hear = Team._hear

    def look(self: Team) -> Any:
        message = hear(self)
        if message[0] == "work":
            *_, rows, histories = message
            assert set(histories) == {place for row in rows for place in range(row.start, row.stop)}
        if message[0] == "done":
            assert not any(isinstance(kept, Dataset) for kept in gc.get_objects())
        return message

    Team._hear = look  # type: ignore[method-assign]
    train(config, out, known)


def train_and_read(config: Config, out: Path, known: dict[Any, float]) -> None:
    """Process 1 reads its own histories from prepared data and is sent none; process 2 does not see the folder."""
    from dpformer.data.shared_store import Store, StoredHistories
    from dpformer.training.distributed import Team

    rank, read, asked = os.environ["RANK"], StoredHistories.train, set()

    def unseen(self: Store) -> Any:
        raise DpformerError(f"{self.folder} does not exist")

    def watched(self: StoredHistories, user: int) -> Any:
        asked.add(user)
        return read(self, user)

    hear = Team._hear

    def look(self: Team) -> Any:
        message = hear(self)
        if message[0] == "work":
            assert {type(what) is int for what in message[-1].values()} <= {rank == "1"}
        if message[0] == "done":
            assert bool(asked) == (rank == "1")
        return message

    Team._hear, StoredHistories.train = look, watched  # type: ignore[method-assign]
    if rank == "2":
        Store.open = unseen  # type: ignore[method-assign]
    train(config, out, known)


def under_torchrun(size: int, restarts: int, target: Callable[..., None], *args: Any) -> None:
    """An agent of torchrun on this machine, as `torchrun --standalone`, whose processes run `target(*args)`."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    elastic_launch(settings, target)(*args)


def die_and_come_again(times: int) -> None:
    """Each time the processes have found each other, one of them is killed, the leader too."""
    import torch
    import torch.distributed as dist

    from dpformer.training.rendezvous import join_processes

    again = join_processes("gloo")
    restart, rank, size = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank(), dist.get_world_size()
    found = torch.tensor([1.0 + restart])
    dist.all_reduce(found)
    assert found.item() == size * (1 + restart), "these are not all of the same start"
    assert rank > 0 or again == (restart > 0)
    if restart < times and rank == restart % size:
        os.kill(os.getpid(), signal.SIGKILL)
    if restart < times:
        dist.barrier()  # breaks
    dist.destroy_process_group()


def train_and_tell(config: Config, out: Path, known: dict[Any, float]) -> None:
    """What `dpformer train` does under torchrun. Each process leaves its pid beside the folder.

    Stays after 10 steps, after 20 when it is started again, and ends when it is started a third time.
    """
    import typer

    from dpformer.cli.train import run_or_exit
    from tests.training.memo import _known, remember

    remember()
    _known.update(known)
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    pid_file(out, restart, os.environ["RANK"]).write_text(f"{os.getpid()}\n")
    if restart < 2:
        stay(10 * (restart + 1), leave_file(out, restart))
    with contextlib.suppress(typer.Exit):  # sent home
        run_or_exit(config, out)


def pid_file(out: Path, restart: int | str, rank: int | str) -> Path:
    return out.with_name(f"pid-{restart}-{rank}")


def pid_of(out: Path, restart: int, rank: int, seconds: float = 300) -> int:
    """The process of a rank after so many restarts, once it is there."""
    until, path = time.monotonic() + seconds, pid_file(out, restart, rank)
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < until, f"rank {rank} is not there after {restart} restarts"
        time.sleep(0.01)
    return int(path.read_text())


def noise_of_the_step_alone() -> None:
    """The same noise for sums that round otherwise, of which it is a function."""
    from dpformer.training.optimizer import PrivateOptimizer

    PrivateOptimizer._address = lambda self, *_: self._random  # type: ignore[method-assign]


def train_with_little_memory(config: Config, out: Path, known: dict[Any, float]) -> None:
    """On process 1, micro-batches of more than two users do not fit."""
    from dpformer.clipping import PhantomClipping

    noise_of_the_step_alone()
    if os.environ["RANK"] == "1":
        backward = PhantomClipping._backward

        def fragile(self: PhantomClipping, losses: Any, *more: Any) -> Any:
            found = backward(self, losses, *more)
            if len(losses) > 2:
                raise MemoryError("out of memory")
            return found

        PhantomClipping._backward = fragile  # type: ignore[method-assign]
    train(config, out, known)


def wait_for_steps(out: Path, steps: int, seconds: float = 300) -> None:
    """Until the run has taken some steps."""
    until = time.monotonic() + seconds
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert time.monotonic() < until, "the job does not start"
        time.sleep(0.01)


def own_loop(out: Path, seed_key: bytes | None = None) -> None:
    """A training loop of one's own, on one process or several; the first one writes the weights."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    import dpformer as dp
    from dpformer.training.distributed import add_up_gradients, shared_key
    from dpformer.training.rendezvous import join_processes

    join_processes("gloo")
    noise_of_the_step_alone()
    rank, size = dist.get_rank(), dist.get_world_size()
    key = shared_key()
    keys: list[Any] = [None] * size
    dist.all_gather_object(keys, key)
    assert len(set(keys)) == 1 and len(key) == 32
    key = seed_key or key
    torch.manual_seed(0)
    data, labels = torch.randn(40, 5), torch.randint(0, 3, (40,))
    model = torch.nn.Linear(5, 3)
    clipping = dp.PhantomClipping(model)
    optimizer = dp.PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, clip_norm=0.5, expected_batch_size=2, key=key
    )
    for batch in dp.PoissonBatches(40, sample_rate=0.05, steps=12, key=key):
        mine = batch[rank::size]
        if len(mine):
            with clipping.users((data[mine.users], labels[mine.users]), mine) as (one, label):
                loss = F.cross_entropy(model(one), label, reduction="none")
            clipping.backward(loss, dp.clip(0.5))
        add_up_gradients(model.parameters())
        optimizer.step(batch)
        optimizer.zero_grad()
    assert optimizer.event().repeats == 12, "everybody's users are known to each"
    weights: list[Any] = [None] * size
    dist.all_gather_object(weights, model.weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights), "the processes have drifted apart"
    if rank == 0:
        torch.save(model.state_dict(), out)


def wrapped_models() -> None:
    """FSDP2 and DDP are refused by name."""
    import pytest
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import dpformer as dp

    dist.init_process_group("gloo")
    with pytest.raises(dp.UnsupportedUse, match="DistributedDataParallel would never see the clipped sums"):
        dp.PhantomClipping(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2)))
    model = torch.nn.Linear(4, 2)
    before = dp.PhantomClipping(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(dp.UnsupportedUse, match="parameter 'weight' is sharded over processes"):
        dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse, match="is sharded"), before.users(torch.randn(3, 4)):  # only afterwards
        pass
