"""Gaussian noise on a sum: made in pieces as it is added, by all threads; or ahead of time, on a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Thread, local
from typing import cast

import torch
from torch import Tensor

from dpformer.privacy.randomness import SecureNoise, SecureRandom, public_grid

__all__ = ["NoiseAhead", "Numbers", "SecureNoise", "SecureRandom", "public_grid", "release_sum"]

AHEAD = 1 << 22  # numbers made ahead at most, 32 MB: noise for larger models is made when it is added
# Numbers of a sum that get their noise at a time. On the CPU they stay in cache, and with several threads they are so
# few that torch does not start threads of its own for them.
PIECE, THREAD_PIECE, DEVICE_PIECE = 1 << 16, 1 << 15, 1 << 22
_thread = local()


@dataclass(frozen=True)
class Numbers:
    """Standard normal numbers of one address, `count` from `start` on; made when they are asked for, or before."""

    random: SecureRandom
    step: int
    stream: int
    count: int
    start: int = 0
    ready: Tensor | None = None

    def fill(self, out: Tensor, at: int) -> None:
        """out (n,) float64 ← the numbers at, …, at + n − 1 of these, on its device."""
        if self.ready is not None:
            out.copy_(self.ready[at : at + len(out)])
        else:
            self.random.fill_normal(out, step=self.step, stream=self.stream, start=self.start + at)

    def all(self) -> Tensor:
        """(count,) float64, on the CPU."""
        if self.ready is not None:
            return self.ready
        return torch.from_numpy(self.random.normal(self.count, step=self.step, stream=self.stream, start=self.start))


def release_sum(sums: Tensor, numbers: Numbers, deviation: float, divisor: float) -> None:
    """sums ← (sums + deviation·numbers, rounded to the public grid) / divisor, in place; `sums` has shape (count,).

    Sum and noise are added in float64, of which only a piece exists at a time; on the device of the sum, unless that
    has no float64 (MPS).
    """
    place = torch.device("cpu") if sums.device.type == "mps" else sums.device
    threads = min(torch.get_num_threads(), -(-len(sums) // THREAD_PIECE)) if place.type == "cpu" else 1
    piece = DEVICE_PIECE if place.type != "cpu" else THREAD_PIECE if threads > 1 else PIECE
    grid = public_grid(deviation)

    def release(at: int) -> None:
        part = sums[at : at + piece]
        noisy, total = _room(len(part), place)
        numbers.fill(noisy, at)
        noisy.mul_(deviation / grid).add_(total.copy_(part), alpha=1 / grid)  # in units of the grid
        part.copy_(noisy.round_().div_(divisor / grid))

    starts = range(0, len(sums), piece)
    if threads <= 1:
        for at in starts:
            release(at)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(release, starts))


def _room(count: int, place: torch.device) -> Tensor:
    """(2, count) float64 to compute in; on the CPU it is the same for every piece of a thread: fresh memory is slow."""
    if place.type != "cpu":
        return torch.empty(2, count, dtype=torch.float64, device=place)
    if not hasattr(_thread, "room"):
        _thread.room = torch.empty(2, PIECE, dtype=torch.float64)
    return cast(Tensor, _thread.room[:, :count])


class NoiseAhead:
    """Standard normal numbers of fixed sizes, one stream each, for one address after the other.

    `prepare` starts on an address; `take` gives its numbers one stream after the other, waiting if need be, and those
    that were not prepared are made when they are asked for: what is taken never depends on the thread. So a wrong
    guess, a checkpoint between the two or a fork, after which the thread is gone, costs time and nothing else.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def prepare(self, random: SecureRandom, step: int, sizes: list[int]) -> None:
        """Starts to make the numbers of this address."""
        self._worker = _Worker(random, step, sizes)
        self._worker.start()

    def take(self, random: SecureRandom, step: int, sizes: list[int]) -> Iterator[Numbers]:
        """The numbers of this address, stream by stream; they are forgotten here."""
        worker, self._worker = self._worker, None
        made: dict[int, Tensor] = {}
        if worker is not None:
            worker.join()
            if worker.address == _address(random, step, sizes):
                made = worker.arrays
        for stream, size in enumerate(sizes):
            yield Numbers(random, step, stream, size, ready=made.pop(stream, None))


class _Worker(Thread):
    def __init__(self, random: SecureRandom, step: int, sizes: list[int]) -> None:
        super().__init__(name="dpformer-noise")  # not a daemon: those are killed in the middle of foreign code
        self.address = _address(random, step, sizes)
        self.arrays: dict[int, Tensor] = {}  # by stream
        self._work = (random, step, sizes)

    def run(self) -> None:
        random, step, sizes = self._work
        for stream, size in enumerate(sizes):
            self.arrays[stream] = Numbers(random, step, stream, size).all()


def _address(random: SecureRandom, step: int, sizes: list[int]) -> tuple[object, ...]:
    return (random.state_dict()["key"], random.context, step, tuple(sizes))
