"""Noise on sums in one pass of compiled code, in place: the twin of rounded.py, to the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import local
from typing import TYPE_CHECKING

import numpy as np

from dpformer import native
from dpformer.privacy.gaussian import GROUP
from dpformer.privacy.rounded import LEAST_RADIUS, MOST_RADIUS, MOST_SUM, in_double

if TYPE_CHECKING:
    from dpformer.privacy.noise import Run

STRIP = 1 << 16  # numbers whose words are there at a time: they stay in the cache
_thread = local()


class Room:
    """For the words of a strip, and for places, radii and angles of what float32 does not decide."""

    def __init__(self) -> None:
        self.bytes = bytearray(8 * STRIP + 63)  # the cipher may write up to a block more
        self.words = np.frombuffer(self.bytes, dtype=np.int64, count=STRIP)
        self.again = np.empty((3, STRIP), dtype=np.int64)


def release_runs(runs: Sequence[Run], scale: float, per_grid: float, divisor: float) -> None:
    """Each sum ← round(scale·z + per_grid·sum) / divisor."""
    if not hasattr(_thread, "room"):
        _thread.room = Room()
    undecided = [found for run in runs for found in _release(run, _thread.room, scale, per_grid, divisor)]
    if not undecided:
        return
    sums, places, numbers, radii, angles = zip(*undecided, strict=True)
    noise = scale * in_double(*(np.concatenate(part) for part in (numbers, radii, angles)))
    done = 0
    for some, here in zip(sums, places, strict=True):
        whole = np.rint(noise[done : done + len(here)] + per_grid * some[here].astype(np.float64))
        some[here] = whole / divisor
        done += len(here)


Undecided = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _release(run: Run, room: Room, scale: float, per_grid: float, divisor: float) -> list[Undecided]:
    """What float32 decides; of the rest: the sums, the places in them and in the run, and the words."""
    assert native.kernels is not None
    limits = (math.sqrt(2) * scale, float(LEAST_RADIUS), float(MOST_RADIUS), MOST_SUM, per_grid, divisor)
    numbers, undecided, start = run.pieces[0].numbers, [], run.before
    filled = (0, 0)  # the numbers of the run whose words are there
    for piece in run.pieces:
        sums = piece.sums.detach().numpy()
        end = start + piece.count
        while start < end:
            if start >= filled[1]:
                low = start // GROUP * GROUP
                filled = (low, min(low + STRIP, run.room))
                address = {"step": numbers.step, "stream": numbers.stream, "group": run.group + low // GROUP}
                numbers.random.fill_words(memoryview(room.bytes), filled[1] - low, **address)
            stop, first = min(end, filled[1]), start - filled[0]
            part = sums[piece.count - (end - start) : piece.count - (end - stop)]
            words = room.words[: filled[1] - filled[0]]
            if found := native.kernels.release(words, part, room.again, first, *limits):
                places, radii, angles = room.again[:, :found].copy()
                undecided.append((part, places, places + first, radii, angles))
            start = stop
    return undecided
