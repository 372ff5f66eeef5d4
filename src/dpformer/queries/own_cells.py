"""Canaries of an audit with cells of their own: one cell each, or many, of which a user adds the same to each.

A canary with k cells adds 1/√k to each of them, if the L2 norm is bounded by 1. What is seen of it is the sum over its
cells over √k: 1 and noise. If the largest entry were bounded instead of the norm, it would be √k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpformer.queries.base import Canaries

MANY = 9  # cells of every second canary


@dataclass(frozen=True)
class OwnCells:
    """Which cells are whose: canary j owns `starts[j]` … `starts[j + 1] − 1`."""

    starts: np.ndarray  # (canaries + 1,) int64

    @classmethod
    def of(cls, canaries: int) -> OwnCells:
        return cls(np.append(0, np.cumsum(np.where(np.arange(canaries) % 2, MANY, 1))))

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    def histories(self, member: np.ndarray) -> list[np.ndarray]:
        """The cells of those who take part, one after the other."""
        return [np.arange(*self.starts[j : j + 2]) for j in np.flatnonzero(member)]

    def canaries(self, seen: np.ndarray, deviation: float, member: np.ndarray) -> Canaries:
        """Of what was released of all cells, less what others added."""
        sizes = np.diff(self.starts)
        empty = np.repeat(~member, sizes)
        return Canaries(
            estimate=np.add.reduceat(seen, self.starts[:-1]) / np.sqrt(sizes),
            deviation=deviation,
            noise=seen[None, empty] / deviation,
            many=sizes > 1,
        )
