r"""Standard normal numbers from random words, by Box and Muller in float64, on any device.

Words come in groups of 512: 256 for radii, 256 for angles, and give the 512 numbers

    z_k = r_k·cos(a_k),  z_{256+k} = r_k·sin(a_k),   r = √(−2 ln u),  u = (|w| + ½)·2⁻⁶³,  a = 2π·w'·2⁻⁶⁴

of signed words w and w'. Whole groups are made, so that number i of an address is the same whichever range of numbers
is asked for, and by whom.

**Tail.** u keeps all its bits however small it is, down to 2⁻⁶⁴: the tail reaches √(2·64·ln 2) = 9.4 deviations. What
is missing beyond is seen only where a user moves a coordinate across that end: for a user of norm C, d coordinates and
T steps that is less than 10⁻¹⁹·√d·T of δ.

**Discreteness.** r and a have 53 significant bits, and so have the numbers: below 8 they lie at most 2⁻⁵⁰ apart. The
sum they are added to is rounded to a grid of at least 2⁻¹¹ deviations (`public_grid`), whose cells thus begin and end
where they should to a relative 2⁻³⁹. That is the relative error of a cell's probability, whatever the sum is: for d
coordinates a privacy loss changes by about √d·2⁻³⁹, which is 2·10⁻⁸ for 10⁸ parameters, and by d·2⁻³⁹ at worst.
"""

import math

import numpy as np
import torch
from torch import Tensor

GROUP = 512  # numbers that are made together
HALF = GROUP // 2
SMALLEST = torch.tensor(2.0**-64, dtype=torch.float64)


class Workspace:
    """Room for the transform of up to `size` words on the CPU: fresh memory costs more than the arithmetic."""

    def __init__(self, size: int) -> None:
        self.words = bytearray(8 * size + 63)  # the cipher may write up to a block more
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
    """out (groups, 2, 256) ← the numbers of as many words; the others are room for (groups, 256) numbers each."""
    radius.copy_(words[:, 0]).abs_()
    torch.add(SMALLEST.to(radius.device), radius, alpha=2.0**-63, out=radius)
    radius.log_().mul_(-2)
    if radius.device.type == "cpu":
        np.sqrt(radius.numpy(), out=radius.numpy())  # exactly rounded as torch's, in half the time
    else:
        radius.sqrt_()
    angle.copy_(words[:, 1]).mul_(2 * math.pi * 2.0**-64)
    torch.cos(angle, out=cosine)
    torch.mul(radius, cosine, out=out[:, 0])
    torch.mul(radius, angle.sin_(), out=out[:, 1])
