r"""Standard normal numbers from random words, by the Box–Muller transform in float64, on any device.

Words come in groups of 512: 256 for radii, 256 for angles; they give the 512 numbers

    z_k = r_k·cos(a_k),  z_{256+k} = r_k·sin(a_k),   r = √(−2 ln u),  u = (|w| + ½)·2⁻⁶³,  a = 2π·w'·2⁻⁶⁴

of signed words w and w'. Whole groups are computed, so that number i of an address is the same for every requested
range.

**Tail.** u keeps all its bits however small it is, down to 2⁻⁶⁴: the tail reaches √(2·64·ln 2) = 9.4 standard
deviations. The missing part beyond matters only if a user moves a coordinate across that end: for a user of norm C,
d coordinates and T steps that is less than 10⁻¹⁹·√d·T of δ.

**Discreteness.** r and a have 53 significant bits, and so have the numbers: below 8 their spacing is at most 2⁻⁵⁰. The
sum they are added to is rounded to a grid of at least 2⁻¹¹ standard deviations (`public_grid`), so the cell boundaries
are accurate to a relative 2⁻³⁹. That is the relative error of a cell's probability, whatever the sum is: for d
coordinates a privacy loss changes by about √d·2⁻³⁹, which is 2·10⁻⁸ for 10⁸ parameters, and by d·2⁻³⁹ at worst.
"""

import math

import numpy as np
import torch
from torch import Tensor

GROUP = 512  # numbers generated together
HALF = GROUP // 2
SMALLEST = torch.tensor(2.0**-64, dtype=torch.float64)


class Workspace:
    """Scratch space for transforming up to `size` words on the CPU: allocating costs more than the arithmetic."""

    def __init__(self, size: int) -> None:
        self.words = bytearray(8 * size + 63)  # the cipher may write up to one block more
        self.numbers = [torch.empty(size // 2, dtype=torch.float64) for _ in range(3)]

    def normal(self, out: Tensor) -> None:
        """out (n,) ← the numbers of the first n words; n is a multiple of `GROUP`."""
        words = torch.frombuffer(self.words, dtype=torch.int64, count=len(out)).view(-1, 2, HALF)
        radius, angle, cosine = (room[: len(out) // 2].view(-1, HALF) for room in self.numbers)
        box_muller(words, out.view(-1, 2, HALF), radius, angle, cosine)


def normal_of_words(words: Tensor) -> Tensor:
    """(n,) float64 of (n,) int64, on the device of the words; n is a multiple of `GROUP`."""
    words = words.view(-1, 2, HALF)
    room = [torch.empty(words[:, 0].shape, dtype=torch.float64, device=words.device) for _ in range(3)]
    out = torch.empty(words.shape, dtype=torch.float64, device=words.device)
    box_muller(words, out, *room)
    return out.view(-1)


def box_muller(words: Tensor, out: Tensor, radius: Tensor, angle: Tensor, cosine: Tensor) -> None:
    """out (groups, 2, 256) ← the numbers of as many words; the others are scratch space of (groups, 256) each."""
    radius.copy_(words[:, 0]).abs_()
    torch.add(SMALLEST.to(radius.device), radius, alpha=2.0**-63, out=radius)
    radius.log_().mul_(-2)
    if radius.device.type == "cpu":
        np.sqrt(radius.numpy(), out=radius.numpy())  # exactly rounded like torch's, in half the time
    else:
        radius.sqrt_()
    angle.copy_(words[:, 1]).mul_(2 * math.pi * 2.0**-64)
    torch.cos(angle, out=cosine)
    torch.mul(radius, cosine, out=out[:, 0])
    torch.mul(radius, angle.sin_(), out=out[:, 1])
