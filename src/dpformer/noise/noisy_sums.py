"""Gaussian noise on sums, generated in pieces as it is added, by all threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import local
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dpformer.kernels import native
from dpformer.noise.device_sums import release_on_device
from dpformer.noise.gaussian import GROUP
from dpformer.noise.grid import MOST_SUM, RoundedNoise
from dpformer.noise.native import release_runs
from dpformer.noise.randomness import MOST_NUMBERS, SecureNoise, SecureRandom, public_grid

__all__ = ["Numbers", "SecureNoise", "SecureRandom", "public_grid", "release_sum", "release_sums"]

PIECE = 1 << 19  # numbers of sums processed at a time
WIDE = 1 << 15  # numbers in float64 at a time on the CPU: few enough that torch does not start its own threads
_thread = local()


@dataclass(slots=True)  # created for every parameter in every step, and frozen ones take three times as long to create
class Numbers:
    """Standard normal numbers of one address, `count` from `start`; generated on demand, or in advance."""

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


def in_turn(random: SecureRandom, step: int, counts: Iterable[int]) -> Iterator[Numbers]:
    """Numbers for successive sums from one stream while it lasts: many small sums count as one long one."""
    stream = start = 0
    for count in counts:
        if start + count > MOST_NUMBERS:
            stream, start = stream + 1, 0
        yield Numbers(random, step, stream, count, start)
        start += count


def fill_in_turn(out: Tensor, every: Iterable[Numbers]) -> None:
    """out (n,) ← all numbers of these, one after the other; those with consecutive numbers are generated together."""
    runs: list[Numbers] = []
    for numbers in every:
        last = runs[-1] if runs else None
        if last is not None and last.stream == numbers.stream and last.start + last.count == numbers.start:
            last.count += numbers.count
        else:
            runs.append(replace(numbers))
    for part, run in zip(out.split([run.count for run in runs]), runs, strict=True):
        run.fill(part, 0)


@dataclass(slots=True)
class Piece:
    """Part of a sum: `sums`, of `count` numbers, receives those from `at`."""

    sums: Tensor
    numbers: Numbers
    at: int
    count: int  # stored, since asking a tensor for its length is slow

    @property
    def start(self) -> int:
        """The offset of its numbers in their stream."""
        return self.numbers.start + self.at


class Run:
    """Pieces with consecutive numbers in one stream."""

    def __init__(self, first: Piece) -> None:
        self.pieces, self.count = [first], first.count
        self.group, self.before = divmod(first.start, GROUP)  # numbers of their first group that precede these
        self.end = first.start + self.count

    @property
    def room(self) -> int:
        """The size in whole groups."""
        return -(-(self.before + self.count) // GROUP) * GROUP

    def goes_on(self, piece: Piece) -> bool:
        """Whether this piece uses the next numbers of the stream."""
        last, next_ = self.pieces[-1].numbers, piece.numbers
        same = last.random is next_.random and (last.step, last.stream) == (next_.step, next_.stream)
        return same and piece.start == self.end

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.count += piece.count
        self.end += piece.count

    def read(self, out: Tensor, factor: float) -> None:
        """out (count,) ← the sums times a factor."""
        if len(self.pieces) == 1:
            torch.mul(self.pieces[0].sums, factor, out=out)
        else:
            torch.cat([piece.sums for piece in self.pieces], out=out)
            out.mul_(factor)

    def write(self, numbers: Tensor, divisor: float) -> None:
        """The sums ← numbers (count,), which are overwritten, divided by a divisor."""
        if len(self.pieces) == 1:
            torch.div(numbers, divisor, out=self.pieces[0].sums)
            return
        parts = numbers.div_(divisor).split([piece.count for piece in self.pieces])
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.sums.copy_(part)


def release_sum(sums: Tensor, numbers: Numbers, deviation: float, divisor: float) -> None:
    """One sum; see `release_sums`."""
    release_sums([(sums, numbers)], deviation, divisor)


def release_sums(pairs: Iterable[tuple[Tensor, Numbers]], deviation: float, divisor: float) -> None:
    """Each sum ← (sum + deviation·numbers, rounded to the public grid) / divisor, in place; sums have shape (count,).

    Sum and noise are added in float64, on the device of the sums (device_sums.py), unless that lacks float64 (MPS). On
    the CPU most of it is decided in float32 (grid.py), and small sums share a piece.
    """
    release = Release(deviation, divisor)
    pairs = list(pairs)
    for sums, numbers in pairs:  # compiled code writes by address
        if sums.numel() != numbers.count:
            raise ValueError(f"a sum of {sums.numel()} numbers got noise for {numbers.count}")
    here: list[tuple[Tensor, Numbers]] = []
    there: dict[tuple[torch.device, bool], list[Piece]] = {}  # float32 has a divisor of its own
    for sums, numbers in pairs:
        if sums.device.type in ("cpu", "mps"):
            here.append((sums, numbers))
        else:
            group = there.setdefault((sums.device, sums.dtype == torch.float32), [])
            group.append(Piece(sums, numbers, 0, numbers.count))
    for pieces in there.values():
        release_on_device(pieces, release.scale, 1 / release.grid, release.divisor_of(pieces[0].sums))
    if here:
        _release_here(here, release)


def _release_here(pairs: list[tuple[Tensor, Numbers]], release: Release) -> None:
    """On the CPU, by all threads."""
    total = sum(numbers.count for _, numbers in pairs)
    threads = torch.get_num_threads() if all(sums.is_cpu for sums, _ in pairs) else 1
    each = min(PIECE, max(WIDE, -(-total // (threads * GROUP)) * GROUP))  # one piece per thread, if large enough
    if threads <= 1 or total <= each:
        for pieces in _pieces(pairs, PIECE):
            release(pieces)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(release, list(_pieces(pairs, each))))


def _pieces(pairs: Iterable[tuple[Tensor, Numbers]], size: int) -> Iterator[list[Run]]:
    """Units of work: a piece of a large sum, or several small sums."""
    together: list[Run] = []
    filled = 0
    for sums, numbers in pairs:
        for at in range(0, numbers.count, size):
            count = min(size, numbers.count - at)
            piece = Piece(sums if numbers.count <= size else sums[at : at + count], numbers, at, count)
            if not _is_narrow(piece):
                yield [Run(piece)]
                continue
            if together and filled + piece.count + GROUP > size:
                yield together
                together, filled = [], 0
            if together and together[-1].goes_on(piece):
                filled -= together[-1].room
                together[-1].add(piece)
            else:
                together.append(Run(piece))
            filled += together[-1].room
    if together:
        yield together


def _is_narrow(piece: Piece) -> bool:
    """Whether float32 can decide: a contiguous float32 sum on the CPU, with noise that is a function of words."""
    sums = piece.sums
    return sums.dtype == torch.float32 and sums.is_cpu and sums.is_contiguous() and piece.numbers.ready is None


class Release:
    """(sum + deviation·noise, rounded to the grid) / divisor."""

    def __init__(self, deviation: float, divisor: float) -> None:
        self.grid = public_grid(deviation)
        self.scale, self.divisor = deviation / self.grid, divisor / self.grid
        with np.errstate(over="ignore"):
            narrow = float(np.float32(self.divisor))
        # The divisor of float32 must not depend on how the sum is computed.
        self.narrow_divisor = narrow if 2.0**-100 < narrow < 2.0**100 else self.divisor
        self.narrow = narrow == self.narrow_divisor and 2.0**-100 < self.grid < 2.0**100

    def __call__(self, runs: list[Run]) -> None:
        if native.supports(runs[0].pieces[0].sums) and self.narrow and _is_narrow(runs[0].pieces[0]):
            release_runs(runs, self.scale, 1 / self.grid, self.narrow_divisor)
        elif not (self.narrow and _is_narrow(runs[0].pieces[0]) and self._round(runs)):
            for run in runs:
                for piece in run.pieces:
                    self.wide(piece)

    def _round(self, runs: list[Run]) -> bool:
        """In float32, where that decides; returns False, without effect, if sums are too large for it."""
        rounded = _rounded_noise(sum(run.room for run in runs))
        done, places = 0, []
        for run in runs:
            places.append(slice(done + run.before, done + run.before + run.count))
            run.read(rounded.sums[places[-1]], 1 / self.grid)
            done += run.room
        sums = rounded.sums[:done].numpy()
        if not (sums.max() <= MOST_SUM and sums.min() >= -MOST_SUM):
            rounded.sums.zero_()
            return False
        whole = rounded.round(done, self.scale, partial(_fill, runs))
        for run, place in zip(runs, places, strict=True):
            run.write(whole[place], self.narrow_divisor)
        return True

    def wide(self, piece: Piece) -> None:
        """In float64."""
        divisor = self.divisor_of(piece.sums)
        for at in range(0, piece.count, WIDE):
            sums = piece.sums[at : at + WIDE]
            noisy, total = _room(len(sums))
            piece.numbers.fill(noisy, piece.at + at)
            noisy.mul_(self.scale).add_(total.copy_(sums), alpha=1 / self.grid)  # in units of the grid
            sums.copy_(noisy.round_().div_(divisor))

    def divisor_of(self, sums: Tensor) -> float:
        """The divisor in units of the grid."""
        return self.narrow_divisor if sums.dtype == torch.float32 else self.divisor


def _fill(runs: list[Run], words: memoryview, start: int, count: int) -> None:
    """The words of `count` numbers from `start`, for consecutive runs, each in whole groups."""
    done = 0
    for run in runs:
        if done >= start + count:
            return
        low, high = max(start, done), min(start + count, done + run.room)
        if low < high:
            numbers, group = run.pieces[0].numbers, run.group + (low - done) // GROUP
            address = {"step": numbers.step, "stream": numbers.stream, "group": group}
            numbers.random.fill_words(words[8 * (low - start) :], high - low, **address)
        done += run.room


def _rounded_noise(count: int) -> RoundedNoise:
    """Scratch space for this many numbers, per thread, because allocating is slow."""
    if not hasattr(_thread, "rounded") or _thread.rounded.size < count:
        _thread.rounded = RoundedNoise(max(count, WIDE))
    return cast(RoundedNoise, _thread.rounded)


def _room(count: int) -> Tensor:
    """(2, count) float64 scratch space, shared by all pieces of a thread."""
    if not hasattr(_thread, "room"):
        _thread.room = torch.empty(2, WIDE, dtype=torch.float64)
    return cast(Tensor, _thread.room[:, :count])
