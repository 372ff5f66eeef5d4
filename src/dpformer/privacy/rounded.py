r"""Noise that is rounded to the public grid, in float32 wherever float32 decides the rounding.

What is released is y = round((s + σ·z)/grid), z from 64 + 64 bits by Box and Muller in float64 (gaussian.py). Here x,
the number to be rounded, is computed in float32 first. Where it is farther from the middle of two cells than the error
of float32 can be, y is known; the others, about two in a hundred, are computed again in float64. So y is the same, to
the last bit, in half the time: no claim about noise changes.

**Error.** In units of e = 2⁻²⁴, half an ulp of 1, with two ulp allowed to every function of the library (theirs have
one). R = √(ln(2⁶³/|w|)) is the radius over √2, A = 2π·w'·2⁻⁶⁴ the angle, a = √2·σ/grid ≤ √2·2¹¹ the scale:

    2⁶³/|w|           2e, relative (the word is rounded, then divided; the ½ of gaussian.py is far below)
    L = ln(…)         2e + 4e·L
    R = √L            e/R + 3e·R
    A, |A| ≤ π        2.5e·π
    cos A, sin A      2.5e·π + 2e < 10e
    R·cos A           e·(1/R + 14R) ≤ 65e              for 2⁻⁶ ≤ R ≤ 3.9
    x = a·R·cos A + t   a·65e + 2e·3.9a + 2⁻¹⁰         for |t| = |s/grid| ≤ 2¹³, which is exact; then |x| < 2¹⁴·⁵

Pairs with other radii are computed again too (one in 4,000), and pieces with larger sums are not computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpformer.privacy.gaussian import GROUP, HALF, box_muller

LEAST_RADIUS, MOST_RADIUS = np.float32(2.0**-6), np.float32(3.9)
MOST_SUM = 2.0**13  # in units of the grid
ONE_ULP = 2.0**-24
# Numbers computed at a time; with several threads so few that torch does not start threads of its own for them.
STRIP, THREAD_STRIP = 1 << 17, 1 << 15
_TOP = torch.tensor(2.0**63)
Fill = Callable[[memoryview, int, int], None]


def tolerance(scale: float) -> float:
    """How far x in float32 can be from x, in units of the grid; scale: σ/grid."""
    a = math.sqrt(2) * scale
    return a * 65 * ONE_ULP + 2 * a * float(MOST_RADIUS) * ONE_ULP + 2.0**-10


class RoundedNoise:
    """Room for `size` sums, whole groups of numbers, on the CPU, and what is computed of them.

    The arithmetic is done in strips that stay in the cache; what is to be computed again is so few numbers that it is
    done once for all strips.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounded, self.sums = torch.empty(size), torch.zeros(size)
        strip = min(size, STRIP)
        self._bytes = bytearray(8 * strip + 63)  # the cipher may write up to a block more
        self._words = torch.frombuffer(self._bytes, dtype=torch.int64, count=strip)
        self._radius, self._angle, self._cosine = (torch.empty(strip // 2) for _ in range(3))
        self._x, self._flags = torch.empty(strip), np.empty(strip, dtype=bool)

    def round(self, count: int, scale: float, fill: Fill) -> Tensor:
        """(count,) float32: round(scale·z + sums) of the first `count` sums, all at most `MOST_SUM`.

        `fill(bytes, start, count)` writes the random words of the numbers from `start` on, whole groups.
        """
        strip = STRIP if torch.get_num_threads() == 1 else THREAD_STRIP
        again = []
        for at in range(0, count, strip):
            fill(memoryview(self._bytes), at, min(strip, count - at))
            again.append(self._round(at, min(strip, count - at), scale))
        places, radius, angle = (np.concatenate(part) for part in zip(*again, strict=True))
        self._compute_again(places, radius, angle, scale)
        return self.rounded[:count]

    def _round(self, at: int, count: int, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One strip, in float32; the places where that does not decide, with their words for radius and angle."""
        self._normal(self._words[:count])
        x, y = self._x[:count], self.rounded[at : at + count]
        x.mul_(math.sqrt(2) * scale).add_(self.sums[at : at + count])
        torch.round(x, out=y)
        x.sub_(y).abs_()
        near = np.flatnonzero(np.greater(x.numpy(), np.float32(0.5 - tolerance(scale)), out=self._flags[:count]))
        pairs = self._odd_pairs(count)
        first = pairs // HALF * GROUP + pairs % HALF
        places = np.concatenate([near, first, first + HALF])
        first, words = places & ~HALF, self._words.numpy()
        return places + at, words[first], words[first + HALF]

    def _normal(self, words: Tensor) -> None:
        """x ← z/√2 in float32."""
        count = len(words)
        words, x = words.view(-1, 2, HALF), self._x[:count].view(-1, 2, HALF)
        radius, angle, cosine = (r[: count // 2].view(-1, HALF) for r in (self._radius, self._angle, self._cosine))
        torch.div(_TOP, radius.copy_(words[:, 0]).abs_(), out=radius).log_()
        np.sqrt(radius.numpy(), out=radius.numpy())  # exactly rounded as torch's, in half the time
        angle.copy_(words[:, 1]).mul_(2 * math.pi * 2.0**-64)
        torch.cos(angle, out=cosine)
        torch.mul(radius, cosine, out=x[:, 0])
        torch.mul(radius, angle.sin_(), out=x[:, 1])

    def _odd_pairs(self, count: int) -> np.ndarray:
        """Pairs whose radius is so small or so large that the bound on the error does not hold."""
        radius, flags = self._radius[: count // 2].numpy(), self._flags[: count // 2]
        odd = np.less(radius, LEAST_RADIUS, out=flags)
        if not radius.max() <= MOST_RADIUS:
            odd |= radius > MOST_RADIUS
        return np.flatnonzero(odd)

    def _compute_again(self, places: np.ndarray, radius: np.ndarray, angle: np.ndarray, scale: float) -> None:
        """rounded[places] in float64, of their words."""
        numbers, *room = torch.empty(5, len(places), dtype=torch.float64).split([2, 1, 1, 1])
        box_muller(torch.from_numpy(np.stack([radius, angle])[None]), numbers[None], *room)
        cosines, sines = numbers.numpy()
        z = np.where(places & HALF, sines, cosines)
        self.rounded.numpy()[places] = np.rint(z * scale + self.sums.numpy()[places])
