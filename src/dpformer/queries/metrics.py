"""Metrics with differential privacy: noisy means of NDCG and HIT over users' held-out items, and the share of repeats.

The metric table (`evaluation.metrics`) says which metrics are released. User u adds

    v_u = (NDCG_u, HIT_u, 1, R_u)/√n,     R_u = 1[the held-out item is in u's history].

Each part is at most 1. If items of the history are excluded from recommendations, a repeat is never recommended, so a
user with R_u = 1 has NDCG_u = HIT_u = 0: at most three parts are non-zero, and n = 3 bounds the L2 norm by 1 however
good the ranks are. If they are recommended, n = 4. Users without a held-out item add nothing. With noise z·N(0, I) on
the sum it is one Gaussian event for the ledger:

    s = Σ_u v_u + z·N(0, I),     NDCG ≈ s₁ / s₃,     HIT ≈ s₂ / s₃,     repeats ≈ s₄ / s₃

The third part counts the users who were tested, because the number of users with enough items is private too. The
standard deviation of a value is about √n·z / users: 0.006 at z = 20 on MovieLens-1M, at 0.07% more noise in training.

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
from numpy.typing import ArrayLike
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
REPEATS = "repeats"
OF_SERVED = "test items, already-seen items excluded"
OF_ALL = "test items, already-seen items ranked too"
NOTABLE = 0.05  # share of repeats from which recommending seen items is suggested, if noise does not explain it


def scale_of(parts: int) -> float:
    """The divisor of parts of at most 1 each, such that their norm is at most 1, in floating point too."""
    return math.sqrt(parts) * (1 + 1e-12)


@dataclass(frozen=True)
class MetricRelease:
    """Noisy sums that may be published, their cost, and the metrics that follow from them."""

    sums: tuple[float, ...]  # s: everything released: one sum per metric, the number of users, and that of repeats
    event: Gaussian  # for the ledger
    k: int = DEPTH
    filter_seen: bool = True  # whether items of the history were excluded

    @property
    def _scale(self) -> float:
        return scale_of(_most_parts(self.filter_seen))

    @property
    def _users(self) -> float:
        return max(self.sums[-2] * self._scale, 1.0)

    def _share(self, part: float) -> float:
        return min(max(part * self._scale / self._users, 0.0), 1.0)

    @property
    def values(self) -> dict[str, float]:
        """Each metric at k, in [0, 1]."""
        return {metric.label(self.k): self._share(part) for metric, part in zip(released(), self.sums, strict=False)}

    @property
    def repeats(self) -> float:
        """The share of held-out items that are in the user's history, in [0, 1]."""
        return self._share(self.sums[-1])

    @property
    def deviation(self) -> float:
        """The approximate standard deviation of each value due to noise."""
        return self._scale * self.event.noise_multiplier / self._users

    def to_dict(self) -> dict[str, Any]:
        """The values for the statement. The event is in its ledger."""
        return {
            "of": OF_SERVED if self.filter_seen else OF_ALL,
            **self.values,
            REPEATS: self.repeats,
            "deviation": self.deviation,
            "sums": [*self.sums],
        }

    @classmethod
    def from_dict(cls, facts: dict[str, Any], event: Gaussian) -> MetricRelease:
        """The inverse of `to_dict`; refuses sums that are not on the rounding grid of a release."""
        sums, parts = facts.get("sums"), len(released()) + 2
        if not (isinstance(sums, list) and len(sums) == parts and all(type(part) is float for part in sums)):
            raise ValueError(f"metrics have {parts} noisy sums, not {sums!r}")
        grid = public_grid(event.noise_multiplier)
        if not all(math.isfinite(part) and (part / grid).is_integer() for part in sums):
            raise ValueError("the sums of the metrics are not on the grid of their noise, so no release produced them")
        return cls(tuple(sums), event, filter_seen=facts.get("of") != OF_ALL)

    def p_value(self, ranks: Tensor, repeats: ArrayLike | None = None) -> float:
        """The p-value of the distance to the exact sums under the noise of the event (χ², two-sided)."""
        from scipy import stats

        noise = (np.array(self.sums) - _sums(ranks, repeats, self.k, self.filter_seen)) / self.event.noise_multiplier
        squares, parts = float(np.square(noise).sum()), len(self.sums)
        return 2 * min(float(stats.chi2.cdf(squares, parts)), float(stats.chi2.sf(squares, parts)))


def release_metrics(
    ranks: Tensor,
    noise_multiplier: float,
    *,
    repeats: ArrayLike | None = None,
    filter_seen: bool = True,
    k: int = DEPTH,
    label: str = LABEL,
    random: SecureRandom | None = None,
) -> MetricRelease:
    """Release the metrics of one evaluation, at depth k.

    Args:
        ranks: (U,) ranks of the held-out items, one per user: `evaluate(...).served`. Two ranks of one user are not
            allowed.
        noise_multiplier: z, in units of one user's contribution.
        repeats: (U,) whether each held-out item is in the user's history: `evaluate(...).repeats`; by default none is.
        filter_seen: whether items of the history are excluded from recommendations. If so, a repeat has no rank, and
            whatever it was given is ignored.
        k: depth of the ranking.
        label: label of the event.
        random: random numbers for this release only, since they determine the noise; by default from a new key.
    """
    noise_multiplier, k = positive("noise_multiplier", noise_multiplier), whole("k", k, 1)
    if ranks.ndim != 1 or (len(ranks) and int(ranks.min()) < 1):
        raise ValueError(f"ranks must be one number per user, from 1, not of shape {tuple(ranks.shape)}")
    random = random or SecureRandom("metrics, released once")
    exact = _sums(ranks, repeats, k, filter_seen)
    noisy = exact + noise_multiplier * random.normal(len(exact), step=0)
    grid = public_grid(noise_multiplier)
    sums = tuple(float(part) for part in np.round(noisy / grid) * grid)
    return MetricRelease(sums, Gaussian(noise_multiplier, label=label, private=random.private), k, filter_seen)


def _most_parts(filter_seen: bool) -> int:
    """n: how many parts of v_u can be non-zero: all, except that a repeat that is never recommended has no metrics."""
    return len(released()) + (1 if filter_seen else 2)


def _sums(ranks: Tensor, repeats: ArrayLike | None, k: int, filter_seen: bool) -> np.ndarray:
    """Σ_u v_u. Not private."""
    return np.asarray(user_values(ranks, repeats, k, filter_seen).sum(0))


def user_values(ranks: Tensor, repeats: ArrayLike | None, k: int, filter_seen: bool = True) -> np.ndarray:
    """(U, metrics + 2): v_u of each user, of norm at most 1."""
    again = np.zeros(len(ranks)) if repeats is None else np.asarray(repeats, dtype=np.float64)
    if again.shape != (len(ranks),) or not np.isin(again, (0, 1)).all():
        raise ValueError(f"repeats must be one truth value per rank, of which there are {len(ranks)}")
    if not len(ranks):
        return np.zeros((0, len(released()) + 2))
    one = ranks[:, None]  # metrics average over the last dimension, here one user
    found = [metric(one, k).numpy() * (1 - again if filter_seen else 1) for metric in released()]
    return np.stack([*found, np.ones(len(ranks)), again], axis=1) / scale_of(_most_parts(filter_seen))


def repeats_words(found: Mapping[str, Any]) -> str:
    """A sentence on the released share of repeats, if it is noticeably above zero; empty otherwise."""
    share, noise = found.get(REPEATS, 0.0), 2 * found["deviation"]
    if share < max(NOTABLE, noise):
        return ""
    said = f"{share:.1%} (± {noise:.1%}) of the held-out items are repeats: the user already had them"
    if found["of"] == OF_ALL:
        return said
    return (
        f"{said}, and recommendations leave out such items; --allow-seen includes them, and --repeat-weight ranks them "
        "higher in a model of counts"
    )


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
        ranks, repeats = question.ranks()
        found = release_metrics(
            ranks,
            event.noise_multiplier,
            repeats=repeats,
            filter_seen=question.config.filter_seen,
            random=random,
        )
        return Answer(found, found.event)

    def words(self, event: Mapping[str, Any], facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        if self.stated not in facts:
            return super().words(event, facts, unit)
        found = facts[self.stated]
        values = [f"{metric.heading()} {found[metric.label()]:.4f}" for metric in released()]
        values.append(f"a share of repeats of {found[REPEATS]:.4f}")
        return (
            f"Accuracy on held-out items was measured once, with noise (ε = {round_up(event['epsilon_alone'])} on its "
            f"own): {', '.join(values[:-1])} and {values[-1]}, each most likely within {2 * found['deviation']:.4f} of "
            "the exact value. The ε above includes it, so all of these numbers may be published."
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
        if release.filter_seen != seen.config.filter_seen:
            return Finding(name, False, "are of recommendations other than those of config.toml")
        if release.p_value(*seen.ranks()) < ALARM:
            return Finding(name, False, "differ from this model's metrics by more than the noise in the ledger")
        return Finding(name, True, "match this model, with the noise in the ledger")

    def canaries(self, event: Gaussian, member: np.ndarray, seed: int | None = None) -> Canaries:
        """One release per canary, whose held-out item is ranked first: the largest contribution of one user."""
        noise_multiplier = event.noise_multiplier
        random = SecureRandom(LABEL, seed=seed)
        first, nobody = torch.ones(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        (added,) = user_values(first, None, DEPTH)  # of norm 1
        sums = [
            release_metrics(first if takes_part else nobody, noise_multiplier, random=random.within(str(j))).sums
            for j, takes_part in enumerate(member)
        ]
        seen = np.array(sums).T  # (parts, canaries)
        return Canaries(added @ seen, noise_multiplier, seen[:, ~member] / noise_multiplier)


METRICS = MetricsQuery()
