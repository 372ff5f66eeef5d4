"""The noise of past steps, from which that of the next step is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from dpformer.noise.mechanisms.base import Noise


class NoiseHistory:
    """Solves C·y = z (base.py) step by step: y_t = (z_t − Σ_{k≥1} c_k·y_{t−k}) / c_0, for every parameter.

    Args:
        noise: the mechanism; b − 1 copies of the parameters are kept in float64.
    """

    def __init__(self, noise: Noise) -> None:
        self.noise = noise
        self._coefficients = noise.coefficients().tolist()
        self._steps: deque[list[Tensor]] = deque(maxlen=len(self._coefficients) - 1)  # latest first

    def correlated(self, numbers: Tensor, place: int) -> Tensor:
        """(n,) y_t of the parameter at this index, from its independent numbers z_t, in their memory."""
        for c, step in zip(self._coefficients[1:], self._steps, strict=False):  # the first steps have fewer
            numbers.sub_(step[place].view(-1), alpha=c)
        return numbers.div_(self._coefficients[0])

    def check(self, shapes: list[tuple[int, ...]]) -> None:
        """Noise can be cancelled only where it was added."""
        if any([tuple(noise.shape) for noise in step] != shapes for step in self._steps):
            raise ValueError(
                f"with {self.noise.name} the same parameters must be trained in every step, but they have changed"
            )

    def add(self, step: list[Tensor]) -> None:
        """Store the noise of a step, in the shapes of its parameters."""
        self._steps.appendleft(step)

    def state(self) -> list[list[Tensor]]:
        return [list(step) for step in self._steps]

    def load(self, saved: Sequence[Sequence[Tensor]], steps: int) -> None:
        """Continue from noise saved after this number of steps; a refused state changes nothing."""
        past = [[noise.to("cpu", torch.float64) for noise in step] for step in saved]
        if not all(bool(noise.isfinite().all()) for step in past for noise in step):
            raise ValueError("the saved noise of past steps is not finite")
        if len(past) != min(steps, len(self._coefficients) - 1):
            raise ValueError(f"after {steps} steps with {self.noise.name}, noise of {len(past)} steps was saved")
        self._steps.clear()
        self._steps.extend(past)

    def __len__(self) -> int:
        return len(self._steps)
