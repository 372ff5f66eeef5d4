"""Which kernels a device other than the CPU has: those in Triton, where it is installed, or one that is registered.

Every caller has a reference in torch operations. A kernel for another type of device is one function:

    register("hpu", add_noise)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

AddNoise = Callable[[Tensor, Tensor, int], None]
_registered: dict[str, AddNoise] = {}


def register(device_type: str, add_noise: AddNoise) -> None:
    """Add a kernel for a type of device, in place of the torch operations of `noise/device_sums.py`.

    `add_noise(sums, constants, before)` does in place what `triton_noise.add_noise` documents.
    """
    if device_type in _registered:
        raise ValueError(f"{device_type} has a kernel for noise already")
    _registered[device_type] = add_noise


def add_noise_on(device: torch.device) -> AddNoise | None:
    """The kernel that adds noise on a device; None: it has none."""
    if device.type in _registered:
        return _registered[device.type]
    return _add_noise() if device.type in ("cuda", "xpu") or os.environ.get("TRITON_INTERPRET") == "1" else None


@cache
def _add_noise() -> AddNoise | None:
    try:
        from dpformer.kernels.triton_noise import add_noise
    except ImportError:  # not installed, or a version without what it needs
        return None
    return add_noise
