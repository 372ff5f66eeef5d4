"""Which kernels a device other than the CPU has: those in Triton, where it is installed and knows the device.

Every caller has a reference in torch operations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

AddNoise = Callable[[Tensor, Tensor, int], None]


def add_noise_on(device: torch.device) -> AddNoise | None:
    """`triton_noise.add_noise` for a device; None: it has none."""
    return _add_noise() if device.type in ("cuda", "xpu") or os.environ.get("TRITON_INTERPRET") == "1" else None


@cache
def _add_noise() -> AddNoise | None:
    try:
        from dpformer.kernels.triton_noise import add_noise
    except ImportError:  # not installed, or a version without what it needs
        return None
    return add_noise
