"""Where a run computes: the requested device, or a GPU if there is one."""

from __future__ import annotations

import torch

from dpformer.errors import DpformerError


def device_of(wanted: str | None) -> torch.device:
    """The device, after a test: sums over users are in float64, which not every device supports.

    "cuda" is the current GPU; with several processes each has its own (`distributed.start_team`).
    """
    name = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones((), dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts
        reason = str(error).strip().partition("\n")[0].rstrip(".")[:120]
        raise DpformerError(f"device is {name!r}, but torch cannot compute on it: {reason}; try --device cpu") from None
    return device
