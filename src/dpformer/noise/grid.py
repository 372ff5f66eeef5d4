r"""Noise rounded to the public grid, in float32 wherever float32 decides the rounding.

The released value is y = round((s + σ·z)/grid), with z from 64 + 64 bits by Box–Muller in float64 (gaussian.py). Here
x, the number to be rounded, is first computed in float32. If it is farther from the midpoint of two cells than the
possible error of float32, y is known; the others, about two in a hundred, are recomputed in float64. So y is the same,
to the last bit, in half the time: no claim about noise changes.

**Error.** In units of e = 2⁻²⁴, half an ulp of 1, with two ulp allowed for every library function (theirs have
one). R = √(ln(2⁶³/|w|)) is the radius over √2, A = 2π·w'·2⁻⁶⁴ the angle, a = √2·σ/grid ≤ √2·2¹¹ the scale:

    2⁶³/|w|           2e, relative (the word is rounded, then divided; the ½ of gaussian.py is far below)
    L = ln(…)         2e + 4e·L
    R = √L            e/R + 3e·R
    A, |A| ≤ π        2.5e·π
    cos A, sin A      2.5e·π + 2e < 10e
    R·cos A           e·(1/R + 14R) ≤ 65e              for 2⁻⁶ ≤ R ≤ 3.9
    x = a·R·cos A + t   a·65e + 2e·3.9a + 2⁻¹⁰         for |t| = |s/grid| ≤ 2¹³, which is exact; then |x| < 2¹⁴·⁵

Pairs with other radii are recomputed too (one in 4,000), and pieces with larger sums are not computed in float32.

That is the largest error of any number, and the tolerance used here, in NumPy. Compiled code (native.py) does the same
in one pass and allows each number its own error, e·(a·(1/R + 16R) + |x|), so that six in a thousand are recomputed:
its angle is reduced to an eighth of a circle in integers, so that cosine and sine are off by less than 5e (10e are
in the bound), R·cos A by e·(1/R + 14R), two products with a add 2e·a·R, and the last sum rounds by e·|x|.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpformer.noise.gaussian import GROUP, HALF, box_muller

LEAST_RADIUS, MOST_RADIUS = np.float32(2.0**-6), np.float32(3.9)
MOST_SUM = 2.0**13  # in units of the grid
ONE_ULP = 2.0**-24
# Numbers computed at a time; with several threads few enough that torch does not start its own threads.
STRIP, THREAD_STRIP = 1 << 17, 1 << 16
TOP = np.float32(2.0**63)
Fill = Callable[[memoryview, int, int], None]


def tolerance(scale: float) -> float:
    """The largest error of x in float32, in units of the grid; scale: σ/grid."""
    a = math.sqrt(2) * scale
    return a * 65 * ONE_ULP + 2 * a * float(MOST_RADIUS) * ONE_ULP + 2.0**-10


def in_double(places: np.ndarray, radius: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """The numbers at these indices, counted from the start of any group, in float64, from their words."""
    numbers, *room = torch.empty(5, len(places), dtype=torch.float64).split([2, 1, 1, 1])
    box_muller(torch.from_numpy(np.stack([radius, angle])[None]), numbers[None], *room)
    cosines, sines = numbers.numpy()
    return np.where(places & HALF, sines, cosines)


class RoundedNoise:
    """Scratch space for at least `size` sums, in whole groups of numbers, on the CPU.

    The arithmetic is done in strips that fit in the cache; the few numbers to recompute are handled once for all
    strips.
    """

    def __init__(self, size: int) -> None:
        self.size = size = -(-size // GROUP) * GROUP
        self.rounded, self.sums = torch.empty(size), torch.zeros(size)
        self._strip: Strip | None = None

    def round(self, count: int, scale: float, fill: Fill) -> Tensor:
        """(count,) float32: round(scale·z + sums) of the first `count` sums, all at most `MOST_SUM`.

        `fill(bytes, start, count)` writes the random words of the numbers from `start`, in whole groups.
        """
        sums, rounded, again = self.sums.numpy(), self.rounded.numpy(), []
        each = min(self.size, STRIP if torch.get_num_threads() == 1 else THREAD_STRIP)
        if self._strip is None or self._strip.count != each:
            self._strip = Strip(each)
        for at in range(0, count, each):
            part = slice(at, min(at + each, count))
            strip = self._strip.first(part.stop - at)
            fill(memoryview(strip.bytes), at, part.stop - at)
            places, radius, angle = strip.round(sums[part], rounded[part], scale)
            again.append((places + at, radius, angle))
        places, radius, angle = (np.concatenate(part) for part in zip(*again, strict=True))
        self._compute_again(places, radius, angle, scale)
        return self.rounded[:count]

    def _compute_again(self, places: np.ndarray, radius: np.ndarray, angle: np.ndarray, scale: float) -> None:
        """rounded[places] in float64, from their words."""
        z = in_double(places, radius, angle)
        self.rounded.numpy()[places] = np.rint(z * scale + self.sums.numpy()[places])


class Strip:
    """Numbers computed at a time, `count` of them in whole groups.

    Views are created once, and NumPy is used where it is as exact: calling torch costs more than the arithmetic.
    """

    def __init__(self, count: int, room: bytearray | None = None) -> None:
        self.count = count
        self.bytes = bytearray(8 * count + 63) if room is None else room  # the cipher may write up to one block more
        self.words = np.frombuffer(self.bytes, dtype=np.int64, count=count)
        radii, angles = torch.from_numpy(self.words).view(-1, 2, HALF).unbind(1)
        self._radii, self._angles = radii, angles
        self._radius, self._angle, self._cosine = (torch.empty(count // 2) for _ in range(3))
        self._radius_rows, self._angle_rows = self._radius.view(-1, HALF), self._angle.view(-1, HALF)
        self._r, self._a, self._c = (room.numpy() for room in (self._radius, self._angle, self._cosine))
        self._x, self._flags = np.empty(count, dtype=np.float32), np.empty(count, dtype=bool)
        self._cosines, self._sines = self._x.reshape(-1, 2, HALF)[:, 0], self._x.reshape(-1, 2, HALF)[:, 1]

    def first(self, count: int) -> Strip:
        """A strip of fewer numbers in the same buffer of words."""
        return self if count == self.count else Strip(count, self.bytes)

    def round(self, sums: np.ndarray, rounded: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """rounded ← round(scale·z + sums) in float32; returns the undecided indices, and their words."""
        odd = self._normal(scale)
        x = np.add(self._x, sums, out=self._x)
        np.rint(x, out=rounded)
        np.abs(np.subtract(x, rounded, out=x), out=x)
        near = np.flatnonzero(np.greater(x, np.float32(0.5 - tolerance(scale)), out=self._flags))
        first = odd // HALF * GROUP + odd % HALF
        places = np.concatenate([near, first, first + HALF])
        first = places & ~HALF
        return places, self.words[first], self.words[first + HALF]

    def _normal(self, scale: float) -> np.ndarray:
        """x ← scale·z in float32; returns the pairs with a radius for which the error bound does not hold."""
        r, a = self._r, self._a
        self._radius_rows.copy_(self._radii)
        with np.errstate(divide="ignore"):  # a word of zero has an infinite radius and is recomputed
            np.divide(TOP, np.abs(r, out=r), out=r)
        self._radius.log_()
        np.sqrt(r, out=r)
        odd = np.flatnonzero(np.less(r, LEAST_RADIUS, out=self._flags[: len(r)]))
        if not r.max() <= MOST_RADIUS:
            odd = np.concatenate([odd, np.flatnonzero(r > MOST_RADIUS)])
            np.minimum(r, MOST_RADIUS, out=r)
        np.multiply(r, np.float32(math.sqrt(2) * scale), out=r)
        self._angle_rows.copy_(self._angles)
        np.multiply(a, np.float32(2 * math.pi * 2.0**-64), out=a)
        torch.cos(self._angle, out=self._cosine)
        self._angle.sin_()
        rows = r.reshape(-1, HALF)
        np.multiply(rows, self._c.reshape(-1, HALF), out=self._cosines)
        np.multiply(rows, a.reshape(-1, HALF), out=self._sines)
        return odd
