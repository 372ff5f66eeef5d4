"""Noise made ahead of time, on another thread, while the gradients it will be added to are computed."""

from threading import Thread

import numpy as np

from dpformer.privacy.randomness import SecureNoise, SecureRandom, public_grid

__all__ = ["NoiseAhead", "SecureNoise", "SecureRandom", "public_grid"]


class NoiseAhead:
    """Standard normal arrays of fixed sizes, one stream each, for one address after the other.

    `prepare` starts on an address; `take` gives its arrays, waiting if need be, or makes them if they were not (or not
    completely) prepared: what is taken never depends on the thread. So a wrong guess, a checkpoint between the two or a
    fork, after which the thread is gone, costs time and nothing else.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def prepare(self, random: SecureRandom, step: int, sizes: list[int]) -> None:
        """Starts to make the arrays of this address."""
        self._worker = _Worker(random, step, sizes)
        self._worker.start()

    def take(self, random: SecureRandom, step: int, sizes: list[int]) -> list[np.ndarray]:
        """The arrays of this address, (size,) float64 each; they are forgotten here."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.join()
            if worker.address == _address(random, step, sizes) and len(worker.arrays) == len(sizes):
                return worker.arrays
        return [_array(random, step, stream, size) for stream, size in enumerate(sizes)]


class _Worker(Thread):
    def __init__(self, random: SecureRandom, step: int, sizes: list[int]) -> None:
        super().__init__(name="dpformer-noise")  # not a daemon: those are killed in the middle of foreign code
        self.address = _address(random, step, sizes)
        self.arrays: list[np.ndarray] = []
        self._work = (random, step, sizes)

    def run(self) -> None:
        random, step, sizes = self._work
        for stream, size in enumerate(sizes):
            self.arrays.append(_array(random, step, stream, size))


def _array(random: SecureRandom, step: int, stream: int, size: int) -> np.ndarray:
    return random.normal(size, step=step, stream=stream)


def _address(random: SecureRandom, step: int, sizes: list[int]) -> tuple[object, ...]:
    return (random.state_dict()["key"], random.context, step, tuple(sizes))
