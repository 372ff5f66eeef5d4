"""Metrics with differential privacy: noisy means of NDCG and HIT over users' held-out items.

The metric table (`evaluation.metrics`) says which metrics are released. User u adds v_u = (NDCG_u, HIT_u, 1)/√3, each
part at most 1, hence an L2 norm of at most 1 however good the ranks are; users without a held-out item add nothing.
With noise z·N(0, I) on the sum it is one Gaussian event for the ledger:

    s = Σ_u v_u + z·N(0, I),     NDCG ≈ s₁ / s₃,     HIT ≈ s₂ / s₃

The last part counts the users who were tested, because the number of users with enough items is private too. The
standard deviation of a value is about √3·z / users: 0.006 at z = 20 on MovieLens-1M, at 0.07% more noise in training.

A user's held-out item is part of the same user's data, so user-level adjacency covers it. That training never saw the
item does not matter: model and metrics are both functions of the data, and both are in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpformer.accounting.arguments import positive, whole
from dpformer.accounting.events import Event, Gaussian
from dpformer.accounting.units import UnitOfPrivacy
from dpformer.evaluation.metrics import DEPTH, released
from dpformer.findings import Finding
from dpformer.format_number import round_up
from dpformer.noise.randomness import SecureRandom, public_grid
from dpformer.queries.base import ALARM, Answer, Canaries, Inspection, Query, Question

if TYPE_CHECKING:
    from dpformer.runs.config import Config

LABEL = "metrics"


def scale_of(parts: int) -> float:
    """The divisor of parts of at most 1 each, such that their norm is at most 1, in floating point too."""
    return math.sqrt(parts) * (1 + 1e-12)


@dataclass(frozen=True)
class MetricRelease:
    """Noisy sums that may be published, their cost, and the metrics that follow from them."""

    sums: tuple[float, ...]  # s: everything released, one sum per metric and the number of users
    event: Gaussian  # for the ledger
    k: int = DEPTH

    @property
    def _scale(self) -> float:
        return scale_of(len(self.sums))

    @property
    def _users(self) -> float:
        return max(self.sums[-1] * self._scale, 1.0)

    @property
    def values(self) -> dict[str, float]:
        """Each metric at k, in [0, 1]."""
        ratios = [min(max(part * self._scale / self._users, 0.0), 1.0) for part in self.sums[:-1]]
        return {metric.label(self.k): ratio for metric, ratio in zip(released(), ratios, strict=True)}

    @property
    def deviation(self) -> float:
        """The approximate standard deviation of each value due to noise."""
        return self._scale * self.event.noise_multiplier / self._users

    def to_dict(self) -> dict[str, Any]:
        """The values for the statement. The event is in its ledger."""
        return {
            "of": "test items, already-seen items excluded",
            **self.values,
            "deviation": self.deviation,
            "sums": [*self.sums],
        }

    @classmethod
    def from_dict(cls, facts: dict[str, Any], event: Gaussian) -> MetricRelease:
        """The inverse of `to_dict`; refuses sums that are not on the rounding grid of a release."""
        sums, parts = facts.get("sums"), len(released()) + 1
        if not (isinstance(sums, list) and len(sums) == parts and all(type(part) is float for part in sums)):
            raise ValueError(f"metrics have {parts} noisy sums, not {sums!r}")
        grid = public_grid(event.noise_multiplier)
        if not all(math.isfinite(part) and (part / grid).is_integer() for part in sums):
            raise ValueError("the sums of the metrics are not on the grid of their noise, so no release produced them")
        return cls(tuple(sums), event)

    def p_value(self, ranks: Tensor) -> float:
        """The p-value of the distance to the exact sums under the noise of the event (χ², two-sided)."""
        from scipy import stats

        noise = (np.array(self.sums) - _sums(ranks, self.k)) / self.event.noise_multiplier
        squares, parts = float(np.square(noise).sum()), len(self.sums)
        return 2 * min(float(stats.chi2.cdf(squares, parts)), float(stats.chi2.sf(squares, parts)))


def release_metrics(
    ranks: Tensor, noise_multiplier: float, *, k: int = DEPTH, label: str = LABEL, random: SecureRandom | None = None
) -> MetricRelease:
    """Release the metrics of one evaluation, at depth k.

    Args:
        ranks: (U,) ranks of the held-out items, one per user: `evaluate(...).served`. Two ranks of one user are not
            allowed.
        noise_multiplier: z, in units of one user's contribution.
        k: depth of the ranking.
        label: label of the event.
        random: random numbers for this release only, since they determine the noise; by default from a new key.
    """
    noise_multiplier, k = positive("noise_multiplier", noise_multiplier), whole("k", k, 1)
    if ranks.ndim != 1 or (len(ranks) and int(ranks.min()) < 1):
        raise ValueError(f"ranks must be one number per user, from 1, not of shape {tuple(ranks.shape)}")
    random = random or SecureRandom("metrics, released once")
    exact = _sums(ranks, k)
    noisy = exact + noise_multiplier * random.normal(len(exact), step=0)
    grid = public_grid(noise_multiplier)
    sums = tuple(float(part) for part in np.round(noisy / grid) * grid)
    return MetricRelease(sums, Gaussian(noise_multiplier, label=label, private=random.private), k)


def _sums(ranks: Tensor, k: int) -> np.ndarray:
    """Σ_u v_u. Not private."""
    values = user_values(ranks, k)
    return np.asarray(values.sum(0) / scale_of(values.shape[1]))


def user_values(ranks: Tensor, k: int) -> np.ndarray:
    """(U, metrics + 1): the metrics of each user, each at most 1, and 1."""
    if not len(ranks):
        return np.zeros((0, len(released()) + 1))
    one = ranks[:, None]  # metrics average over the last dimension, here one user
    return np.stack([*(metric(one, k).numpy() for metric in released()), np.ones(len(ranks))], axis=1)


class MetricsQuery(Query):
    """Accuracy of the trained model on held-out items, with noise, once."""

    label = LABEL
    sentence = "accuracy on held-out items"
    share_option = "metrics_share"
    after_training = True
    stated = "metrics"

    def asked(self, config: Config) -> bool:
        return config.private_metrics

    def run(self, question: Question, event: Event, random: SecureRandom) -> Answer:
        assert question.ranks is not None
        found = release_metrics(question.ranks(), event.noise_multiplier, random=random)
        return Answer(found, found.event)

    def words(self, event: Mapping[str, Any], facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        if self.stated not in facts:
            return super().words(event, facts, unit)
        found = facts[self.stated]
        values = [f"{metric.heading()} {found[metric.label()]:.4f}" for metric in released()]
        both = "both" if len(values) == 2 else "all"
        return (
            f"Accuracy on held-out items was measured once, with noise (ε = {round_up(event['epsilon_alone'])} on its "
            f"own): {', '.join(values[:-1])} and {values[-1]}, each most likely within {2 * found['deviation']:.4f} of "
            f"the exact value. The ε above includes it, so {both} numbers may be published."
        )

    def checks(self, seen: Inspection) -> Iterator[Callable[[], Finding]]:
        yield lambda: self.metrics(seen)

    def metrics(self, seen: Inspection) -> Finding:
        """Stated metrics must be paid for, follow from the released sums, and match the model up to noise."""
        name, stated = "metrics", seen.statement.get(self.stated)
        paid = [event for event in seen.events() if event.label == self.label]
        if stated is None and not paid:
            return Finding(name, True, "none released")
        if stated is None:
            return Finding(name, False, "the ledger holds their event, but the statement has none")
        if not paid or not isinstance(paid[0], Gaussian):
            return Finding(name, False, "stated, but the ledger holds no event for them: they are not covered")
        release = MetricRelease.from_dict(stated, paid[0])
        if release.to_dict() != stated:
            return Finding(name, False, "do not follow from the released noisy sums")
        if seen.dataset is None:
            return Finding(name, None, "follow from the noisy sums; their noise was not checked")
        if release.p_value(seen.ranks()) < ALARM:
            return Finding(name, False, "differ from this model's metrics by more than the noise in the ledger")
        return Finding(name, True, "match this model, with the noise in the ledger")

    def canaries(self, event: Gaussian, member: np.ndarray, seed: int | None = None) -> Canaries:
        """One release per canary, whose held-out item is ranked first: the largest contribution of one user."""
        noise_multiplier = event.noise_multiplier
        random = SecureRandom(LABEL, seed=seed)
        first, nobody = torch.ones(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        sums = [
            release_metrics(first if takes_part else nobody, noise_multiplier, random=random.within(str(j))).sums
            for j, takes_part in enumerate(member)
        ]
        seen = np.array(sums).T  # (parts, canaries)
        return Canaries(seen.sum(0) / math.sqrt(len(seen)), noise_multiplier, seen[:, ~member] / noise_multiplier)


METRICS = MetricsQuery()
