"""The noise of past steps, from which that of the next step is computed."""

from __future__ import annotations

import math
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
        self._shapes: list[tuple[int, ...]] = []
        self._steps: deque[Tensor] = deque(
            maxlen=len(self._coefficients) - 1
        )  # flat, over all parameters; latest first

    def correlated(self, numbers: Tensor) -> list[Tensor]:
        """y_t from independent numbers z_t of all parameters, (n,), in their memory; the part of each, flat.

        It is kept for the steps that follow.
        """
        sizes = [math.prod(shape) for shape in self._shapes]
        past = [step.to(numbers.device) for step in self._steps]
        # On the CPU, vectorised code rounds the last entries of a tensor differently: parts are computed apart.
        pieces = sizes if numbers.is_cpu else [len(numbers)]
        for part, *earlier in zip(*(whole.split(pieces) for whole in [numbers, *past]), strict=True):
            for c, step in zip(self._coefficients[1:], earlier, strict=False):  # the first steps have fewer
                part.sub_(step, alpha=c)
            part.div_(self._coefficients[0])
        self._steps = deque(past, maxlen=self._steps.maxlen)
        self._steps.appendleft(numbers)
        return list(numbers.split(sizes))

    def check(self, shapes: list[tuple[int, ...]]) -> None:
        """Noise can be cancelled only where it was added."""
        if self._steps and self._shapes != shapes:
            raise ValueError(
                f"with {self.noise.name} the same parameters must be trained in every step, but they have changed"
            )
        self._shapes = shapes

    def state(self) -> list[list[Tensor]]:
        """The noise of each step, in the shapes of the parameters."""
        sizes = [math.prod(shape) for shape in self._shapes]
        return [
            [part.view(shape) for part, shape in zip(step.cpu().split(sizes), self._shapes, strict=True)]
            for step in self._steps
        ]

    def load(self, saved: Sequence[Sequence[Tensor]], steps: int) -> None:
        """Continue from noise saved after this number of steps; a refused state changes nothing."""
        past = [[noise.to("cpu", torch.float64) for noise in step] for step in saved]
        if not all(bool(noise.isfinite().all()) for step in past for noise in step):
            raise ValueError("the saved noise of past steps is not finite")
        if len(past) != min(steps, len(self._coefficients) - 1):
            raise ValueError(f"after {steps} steps with {self.noise.name}, noise of {len(past)} steps was saved")
        self._shapes = [tuple(noise.shape) for noise in past[0]] if past else []
        if any([tuple(noise.shape) for noise in step] != self._shapes for step in past):
            raise ValueError("the saved noise of past steps does not have the same shapes in every step")
        self._steps.clear()
        self._steps.extend(torch.cat([noise.reshape(-1) for noise in step]) for step in past)

    def __len__(self) -> int:
        return len(self._steps)
