"""Noise on sums in one pass of compiled code, in place: the twin of grid.py, with the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import local
from typing import TYPE_CHECKING

import numpy as np

from dpformer.kernels import native
from dpformer.noise.gaussian import GROUP
from dpformer.noise.grid import LEAST_RADIUS, MOST_RADIUS, MOST_SUM, in_double

if TYPE_CHECKING:
    from dpformer.noise.noisy_sums import Run

STRIP = 1 << 16  # numbers whose words are generated at a time, which fit in the cache
_thread = local()


class Room:
    """Scratch space for the words of a strip, and for indices, radii and angles that float32 does not decide."""

    def __init__(self) -> None:
        self.bytes = bytearray(8 * STRIP + 63)  # the cipher may write up to one block more
        self.words = np.frombuffer(self.bytes, dtype=np.int64, count=STRIP)
        self.again = np.empty((3, STRIP), dtype=np.int64)
        self.values = np.empty(STRIP, dtype=np.float32)


def release_runs(runs: Sequence[Run], scale: float, per_grid: float, divisor: float) -> None:
    """Each sum ← round(scale·z + per_grid·sum) / divisor."""
    assert native.kernels is not None
    if not hasattr(_thread, "room"):
        _thread.room = Room()
    limits = (math.sqrt(2) * scale, float(LEAST_RADIUS), float(MOST_RADIUS), MOST_SUM, per_grid, divisor)
    undecided = [found for run in runs for found in _release(run, _thread.room, limits)]
    if not undecided:
        return
    pieces, befores, places, radii, angles, values = zip(*undecided, strict=True)
    numbers = np.concatenate([before + some for before, some in zip(befores, places, strict=True)])
    noise = scale * in_double(numbers, np.concatenate(radii), np.concatenate(angles))
    whole = np.rint(noise + per_grid * np.concatenate(values).astype(np.float64))
    decided, done = (whole / divisor).astype(np.float32), 0
    for some, here in zip(pieces, places, strict=True):
        native.kernels.put(some, here, decided[done : done + len(here)])
        done += len(here)


Pieces = list[tuple[int, int]]  # (address, count) of contiguous numbers
Undecided = tuple[Pieces, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _release(run: Run, room: Room, limits: tuple[float, ...]) -> list[Undecided]:
    """Process what float32 decides; returns for the rest: the pieces of the run, the numbers of a group before it, the
    indices in it, the words and the sums."""
    assert native.kernels is not None
    numbers, undecided, done = run.pieces[0].numbers, [], 0
    pieces = [(piece.sums.data_ptr(), piece.count) for piece in run.pieces]
    while done < run.count:
        low = (run.before + done) // GROUP * GROUP
        count = min(STRIP, run.room - low)
        address = {"step": numbers.step, "stream": numbers.stream, "group": run.group + low // GROUP}
        numbers.random.fill_words(memoryview(room.bytes), count, **address)
        first = run.before + done - low
        found, now = native.kernels.release(room.words[:count], pieces, room.again, room.values, first, done, *limits)
        if found:
            undecided.append((pieces, run.before, *room.again[:, :found].copy(), room.values[:found].copy()))
        done += now
    return undecided
