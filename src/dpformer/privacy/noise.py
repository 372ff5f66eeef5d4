"""Noise made ahead of time, on another thread, while the gradients it will be added to are computed."""

from collections.abc import Iterator
from threading import Thread

import numpy as np

from dpformer.privacy.randomness import SecureNoise, SecureRandom, public_grid

__all__ = ["NoiseAhead", "SecureNoise", "SecureRandom", "public_grid"]


AHEAD = 1 << 22  # numbers made ahead at most, 32 MB: noise for a large table is made when it is added


class NoiseAhead:
    """Standard normal arrays of fixed sizes, one stream each, for one address after the other.

    `prepare` starts on an address; `take` gives its arrays one after the other, waiting if need be, and makes those
    that were not prepared: what is taken never depends on the thread. So a wrong guess, a checkpoint between the two or
    a fork, after which the thread is gone, costs time and nothing else.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def prepare(self, random: SecureRandom, step: int, sizes: list[int]) -> None:
        """Starts to make the arrays of this address, those that fit `AHEAD`."""
        self._worker = _Worker(random, step, sizes)
        self._worker.start()

    def take(self, random: SecureRandom, step: int, sizes: list[int]) -> Iterator[np.ndarray]:
        """The arrays of this address, (size,) float64 each; they are forgotten here."""
        worker, self._worker = self._worker, None
        made: dict[int, np.ndarray] = {}
        if worker is not None:
            worker.join()
            if worker.address == _address(random, step, sizes):
                made = worker.arrays
        for stream, size in enumerate(sizes):
            ready = made.pop(stream, None)
            yield random.normal(size, step=step, stream=stream) if ready is None else ready


class _Worker(Thread):
    def __init__(self, random: SecureRandom, step: int, sizes: list[int]) -> None:
        super().__init__(name="dpformer-noise")  # not a daemon: those are killed in the middle of foreign code
        self.address = _address(random, step, sizes)
        self.arrays: dict[int, np.ndarray] = {}  # by stream
        self._work = (random, step, sizes)

    def run(self) -> None:
        random, step, sizes = self._work
        room = AHEAD
        for stream, size in enumerate(sizes):
            if size <= room:
                room -= size
                self.arrays[stream] = random.normal(size, step=step, stream=stream)


def _address(random: SecureRandom, step: int, sizes: list[int]) -> tuple[object, ...]:
    return (random.state_dict()["key"], random.context, step, tuple(sizes))
