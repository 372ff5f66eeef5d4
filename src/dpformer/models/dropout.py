"""Fast dropout on the CPU: torch draws mask elements one by one, this module four at a time.

    y = x·m / P[m = 1],     m ~ Bernoulli(1 − p), with 1 − p rounded to a multiple of 2⁻¹⁶, which is also the divisor

A 64-bit random number makes four elements of a mask. Masks come from the default generator of the device, so
`torch.manual_seed` fixes them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpformer.clipping.functions import on_all_users

LEVELS = 1 << 16


class Dropout(nn.Dropout):
    """`nn.Dropout` with faster masks."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        if input.device.type == "mps":  # lacks full-range 64-bit random numbers
            return F.dropout(input, self.p)
        return masked(input, self.p)


@on_all_users
def masked(input: Tensor, p: float) -> Tensor:
    """input·mask"""
    return input * scaled_mask(input, p)


def scaled_mask(like: Tensor, p: float) -> Tensor:
    """0 with probability p, otherwise 1/(1 − p), in the shape of `like`."""
    kept = max(1, round((1 - p) * LEVELS))
    size = like.numel()
    words = torch.empty(-(-size // 4), dtype=torch.int64, device=like.device).random_(-(2**63), None)
    lanes = words.view(torch.int16)[:size].view(like.shape)  # uniform in −2¹⁵ … 2¹⁵ − 1
    return (lanes < kept - LEVELS // 2).to(like.dtype).mul_(LEVELS / kept)
