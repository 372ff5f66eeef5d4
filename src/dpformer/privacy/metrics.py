"""Metrics with differential privacy: a noisy mean of NDCG and HIT over users' own held-out items.

User u adds v_u = (NDCG_u, HIT_u, 1)/√3, each part at most 1, so an L2 norm of at most 1 however good the ranks are;
users with nothing held out add nothing. With noise z·N(0, I) on the sum it is one Gaussian event for the ledger:

    s = Σ_u v_u + z·N(0, I),     NDCG ≈ s₁ / s₃,     HIT ≈ s₂ / s₃

The third part counts the users who were tested: how many have enough items is the data's secret too. The deviation of a
value is about √3·z / users: 0.006 at z = 20 on MovieLens-1M, at 0.07% more noise in training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dpformer.evaluation.ranking import hit, ndcg
from dpformer.privacy.arguments import positive, whole
from dpformer.privacy.events import Gaussian
from dpformer.privacy.randomness import SecureNoise, public_grid

PARTS = 3


@dataclass(frozen=True)
class MetricRelease:
    """Noisy metrics that may be published, and what they cost."""

    values: dict[str, float]  # in [0, 1]
    deviation: float  # of each value, about
    event: Gaussian  # for the ledger

    def to_dict(self) -> dict[str, Any]:
        return {"values": self.values, "deviation": self.deviation, "event": self.event.to_dict(), "covered": True}


def release_metrics(
    ranks: Tensor, noise_multiplier: float, *, k: int = 10, label: str = "metrics", seed: int | None = None
) -> MetricRelease:
    """Releases NDCG@k and HIT@k of one evaluation.

    Args:
        ranks: (U,) ranks of the held-out items, one a user: `evaluate(...).masked`. Two of one user are not allowed.
        noise_multiplier: z, in units of one user's contribution.
        k: depth of the ranking.
        label: of the event.
        seed: for tests only: marks the event as not private.
    """
    noise_multiplier, k = positive("noise_multiplier", noise_multiplier), whole("k", k, 1)
    if ranks.ndim != 1 or (len(ranks) and int(ranks.min()) < 1):
        raise ValueError(f"ranks must be one number a user, from 1, not of shape {tuple(ranks.shape)}")
    sums = user_values(ranks, k).sum(0) / math.sqrt(PARTS)
    noise = SecureNoise(seed=seed)
    grid = public_grid(noise_multiplier)
    released = np.round((sums + noise_multiplier * noise.normal(PARTS)) / grid) * grid * math.sqrt(PARTS)
    # All below is post-processing of what was released.
    users = max(float(released[2]), 1.0)
    values = np.clip(released[:2] / users, 0.0, 1.0)
    return MetricRelease(
        values={f"ndcg@{k}": float(values[0]), f"hit@{k}": float(values[1])},
        deviation=math.sqrt(PARTS) * noise_multiplier / users,
        event=Gaussian(noise_multiplier, label=label, private=noise.private),
    )


def user_values(ranks: Tensor, k: int) -> np.ndarray:
    """(U, 3): NDCG, HIT and 1 of each user; each at most 1."""
    if not len(ranks):
        return np.zeros((0, PARTS))
    one = ranks[:, None]  # the metrics are means over the last dimension: here of one user
    return np.stack([ndcg(one, k).numpy(), hit(one, k).numpy(), np.ones(len(ranks))], axis=1)
