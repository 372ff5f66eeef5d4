"""From per-user gradient norms to the factors that bound each user's contribution.

A clip function maps norms ‖g_i‖, shape (B,), to factors c_i, shape (B,), with c_i·‖g_i‖ ≤ `clip_norm`. It carries its
bound as the attribute `clip_norm`, so that the engine and the optimiser can check that they speak of the same C.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MOST = 1e12  # of a factor: times the longest rows that are added up in float32, 1e12, it stays far from overflow


class ClipFunction(Protocol):
    """norms (B,) → factors (B,), with factor·norm ≤ `clip_norm` for every user."""

    @property
    def clip_norm(self) -> float: ...

    def __call__(self, norms: Tensor) -> Tensor: ...


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value}")


@dataclass(frozen=True)
class normalize:
    """Every user's gradient is brought to nearly the same length: c = C / (‖g‖ + γ).

    The paper's choice (automatic clipping, Bu et al. 2023): no clipping norm to tune. c·‖g‖ is strictly below C, so
    the sensitivity of the sum is C; γ keeps tiny gradients from being blown up to full length.
    """

    clip_norm: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _positive("clip_norm", self.clip_norm)
        _positive("gamma", self.gamma)
        if self.clip_norm / self.gamma > MOST:
            raise ValueError(
                f"clip_norm / gamma is {self.clip_norm / self.gamma:g}, by which a tiny gradient would be multiplied: "
                f"more than float32 has room for. Give a gamma of at least clip_norm / {MOST:g}"
            )

    def __call__(self, norms: Tensor) -> Tensor:
        return self.clip_norm / (norms + self.gamma)


@dataclass(frozen=True)
class clip:
    """Gradients longer than C are scaled down to C, shorter ones are left alone: c = min(1, C / ‖g‖)."""

    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _positive("clip_norm", self.clip_norm)

    def __call__(self, norms: Tensor) -> Tensor:
        return torch.clamp(self.clip_norm / norms, max=1.0)  # ‖g‖ = 0 gives inf, clamped to 1
