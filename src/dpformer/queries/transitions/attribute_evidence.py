r"""How much attributes say about users: a number released before any budget is spent on them.

Pairs of items that share a rare attribute are *near* (`data/near_pairs.py`): a public set. User u has weights
v_u = (near, other) of the pairs of items at most 12 apart in the history, and the release is

    (n, o) = Σ_u v_u/‖v_u‖₂ + σ_e·N(0, 1)²,    sensitivity 1,    f = n/(n + o).

By chance two items are near with probability c, which is public. The *excess* f − c is 0.00 for attributes dealt to
other items at random, 0.02 for the categories of Yelp, which say little, and above 0.1 for those of Beauty and
MovieLens. With noise of standard deviation s on f, the estimate is that under a normal prior of mean 0.08 and standard
deviation 0.05, so that with few users, and hence much noise, attributes are used as those of most catalogues should be:

    x = ((f − c)·0.05² + 0.08·s²)/(0.05² + s²),    strength = clip((x − 0.01)/0.05, 0, 1).

The strength decides what attributes are used for: a second release of popularity and slower forgetting of the history
(from ½ on), and the share of the back-off. docs/results/attributes.md has the measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpformer.data.near_pairs import chance_of
from dpformer.engines.sums import GRID, Sums
from dpformer.noise.randomness import SecureRandom, public_grid

TYPICAL, SPREAD = 0.08, 0.05  # mean and standard deviation of the prior of the excess
NOTHING, FULL = 0.01, 0.06  # the excess that useless attributes may reach, and that of strength 1
STRONG = 0.5  # strength from which budget is spent on attributes
PRECISE = 0.01  # standard deviation of the noise on f at which more budget is wasted
LEAST, MOST = 0.002, 0.03  # share of the budget


@dataclass(frozen=True)
class AttributeEvidence:
    """The noisy sums of near and other pairs."""

    sums: np.ndarray  # (2,) float64: n, o
    chance: float  # c
    deviation: float  # σ_e; 0: exact, not private

    @property
    def excess(self) -> tuple[float, float]:
        """f − c and the standard deviation of its noise."""
        near, other = self.sums.tolist()
        total = max(near + other, self.deviation, 1e-9)
        share = min(max(near / total, 0.0), 1.0)
        return share - self.chance, self.deviation / total * math.hypot(share, 1 - share)

    @property
    def strength(self) -> float:
        """How far to use the attributes, from 0 to 1."""
        excess, noise = self.excess
        estimate = (excess * SPREAD**2 + TYPICAL * noise**2) / (SPREAD**2 + noise**2)
        return min(max((estimate - NOTHING) / (FULL - NOTHING), 0.0), 1.0)

    @property
    def strong(self) -> bool:
        """Whether attributes are worth part of the budget."""
        return self.strength >= STRONG


def evidence_share(num_users: int, noise_multiplier: float) -> float:
    """The share of the budget, from public numbers: enough for noise of standard deviation 0.01 on f, within limits."""
    return min(max((noise_multiplier / (PRECISE * max(num_users, 1))) ** 2, LEAST), MOST)


def release_evidence(
    sums: Sums, near: np.ndarray, num_items: int, deviation: float, random: SecureRandom
) -> AttributeEvidence:
    """Release the evidence for attributes whose near pairs are given, with this standard deviation of the noise."""
    grid = public_grid(deviation)
    noisy = sums.shared(near, num_items) / GRID + deviation * random.normal(2, step=0)
    return AttributeEvidence(np.round(noisy / grid) * grid, chance_of(near, num_items), deviation)


def exact_evidence(sums: Sums, near: np.ndarray, num_items: int) -> AttributeEvidence:
    """The same without noise. Not private."""
    return AttributeEvidence(sums.shared(near, num_items) / GRID, chance_of(near, num_items), 0.0)
