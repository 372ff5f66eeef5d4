"""Metrics with differential privacy: a noisy mean of NDCG and HIT over users' own held-out items.

User u adds v_u = (NDCG_u, HIT_u, 1)/√3, each part at most 1, so an L2 norm of at most 1 however good the ranks are;
users with nothing held out add nothing. With noise z·N(0, I) on the sum it is one Gaussian event for the ledger:

    s = Σ_u v_u + z·N(0, I),     NDCG ≈ s₁ / s₃,     HIT ≈ s₂ / s₃

The third part counts the users who were tested: how many have enough items is the data's secret too. The deviation of a
value is about √3·z / users: 0.006 at z = 20 on MovieLens-1M, at 0.07% more noise in training.

A user's held-out item is part of the same user's data, so adjacency by whole users covers it. That training never saw
the item does not matter: model and metrics are both functions of the data, and both are in the ledger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dpformer.accounting.arguments import positive, whole
from dpformer.accounting.events import METRICS, Gaussian
from dpformer.evaluation.ranking import hit, ndcg
from dpformer.noise.randomness import SecureRandom, public_grid

PARTS = 3
SCALE = math.sqrt(PARTS) * (1 + 1e-12)  # floating point must not lift a norm above 1
ALARM = 1e-6  # p-value below which numbers are not what they claim to be


@dataclass(frozen=True)
class MetricRelease:
    """Noisy sums that may be published, what they cost, and the metrics that follow from them."""

    sums: tuple[float, ...]  # (3,) s: all that was released
    event: Gaussian  # for the ledger
    k: int = 10

    @property
    def _users(self) -> float:
        return max(self.sums[2] * SCALE, 1.0)

    @property
    def values(self) -> dict[str, float]:
        """NDCG@k and HIT@k, in [0, 1]."""
        ratios = [min(max(part * SCALE / self._users, 0.0), 1.0) for part in self.sums[:2]]
        return {f"ndcg@{self.k}": ratios[0], f"hit@{self.k}": ratios[1]}

    @property
    def deviation(self) -> float:
        """Of each value, about: one deviation of the noise."""
        return SCALE * self.event.noise_multiplier / self._users

    def to_dict(self) -> dict[str, Any]:
        """For the statement. The event is in its ledger."""
        return {
            "of": "test items, as they would be recommended: seen items left out",
            **self.values,
            "deviation": self.deviation,
            "sums": [*self.sums],
        }

    @classmethod
    def from_dict(cls, facts: dict[str, Any], event: Gaussian) -> MetricRelease:
        """The inverse of `to_dict`; refuses sums that did not go through the rounding of a release."""
        sums = facts.get("sums")
        if not (isinstance(sums, list) and len(sums) == PARTS and all(type(part) is float for part in sums)):
            raise ValueError(f"metrics have {PARTS} noisy sums, not {sums!r}")
        grid = public_grid(event.noise_multiplier)
        if not all(math.isfinite(part) and (part / grid).is_integer() for part in sums):
            raise ValueError(
                "the sums of the metrics are not on the grid of their noise: nothing was released that way"
            )
        return cls(tuple(sums), event)

    def p_value(self, ranks: Tensor) -> float:
        """How likely noise is as near to the exact sums, or as far from them, if it is what the event says (χ²)."""
        from scipy import stats

        noise = (np.array(self.sums) - _sums(ranks, self.k)) / self.event.noise_multiplier
        squares = float(np.square(noise).sum())
        return 2 * min(float(stats.chi2.cdf(squares, PARTS)), float(stats.chi2.sf(squares, PARTS)))


def release_metrics(
    ranks: Tensor, noise_multiplier: float, *, k: int = 10, label: str = METRICS, random: SecureRandom | None = None
) -> MetricRelease:
    """Releases NDCG@k and HIT@k of one evaluation.

    Args:
        ranks: (U,) ranks of the held-out items, one a user: `evaluate(...).served`. Two of one user are not allowed.
        noise_multiplier: z, in units of one user's contribution.
        k: depth of the ranking.
        label: of the event.
        random: for this release alone, since the same one gives the same noise; by default under a new key.
    """
    noise_multiplier, k = positive("noise_multiplier", noise_multiplier), whole("k", k, 1)
    if ranks.ndim != 1 or (len(ranks) and int(ranks.min()) < 1):
        raise ValueError(f"ranks must be one number a user, from 1, not of shape {tuple(ranks.shape)}")
    random = random or SecureRandom("metrics, released once")
    noisy = _sums(ranks, k) + noise_multiplier * random.normal(PARTS, step=0)
    grid = public_grid(noise_multiplier)
    sums = tuple(float(part) for part in np.round(noisy / grid) * grid)
    return MetricRelease(sums, Gaussian(noise_multiplier, label=label, private=random.private), k)


def _sums(ranks: Tensor, k: int) -> np.ndarray:
    """Σ_u v_u, (3,). Not private."""
    return np.asarray(user_values(ranks, k).sum(0) / SCALE)


def user_values(ranks: Tensor, k: int) -> np.ndarray:
    """(U, 3): NDCG, HIT and 1 of each user; each at most 1."""
    if not len(ranks):
        return np.zeros((0, PARTS))
    one = ranks[:, None]  # the metrics are means over the last dimension: here of one user
    return np.stack([ndcg(one, k).numpy(), hit(one, k).numpy(), np.ones(len(ranks))], axis=1)
