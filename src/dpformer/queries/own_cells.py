"""Audit canaries with cells of their own: one cell, or many, to which a user adds equally.

A canary with k cells adds 1/√k to each of them if the L2 norm is bounded by 1. The observation is the sum over its
cells divided by √k: 1 plus noise. If the largest entry were bounded instead of the norm, it would be √k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpformer.queries.base import Canaries

MANY = 9  # number of cells of every second canary


@dataclass(frozen=True)
class OwnCells:
    """The owners of cells: canary j owns `starts[j]` … `starts[j + 1] − 1`."""

    starts: np.ndarray  # (canaries + 1,) int64

    @classmethod
    def of(cls, canaries: int) -> OwnCells:
        return cls(np.append(0, np.cumsum(np.where(np.arange(canaries) % 2, MANY, 1))))

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    def histories(self, member: np.ndarray) -> list[np.ndarray]:
        """The cells of each canary that takes part."""
        return [np.arange(*self.starts[j : j + 2]) for j in np.flatnonzero(member)]

    def canaries(self, seen: np.ndarray, deviation: float, member: np.ndarray) -> Canaries:
        """The canaries' observations, from the released values of all cells minus the contributions of others."""
        sizes = np.diff(self.starts)
        empty = np.repeat(~member, sizes)
        return Canaries(
            estimate=np.add.reduceat(seen, self.starts[:-1]) / np.sqrt(sizes),
            deviation=deviation,
            noise=seen[None, empty] / deviation,
            many=sizes > 1,
        )
