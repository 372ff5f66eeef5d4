"""The metric table: a new metric is one entry, and everything that measures, releases or shows accuracy reads it.

The rank r of a user's held-out item counts from 1. There is one relevant item per user, so

    NDCG@k = 1[r ≤ k] / log2(r + 1)      HIT@k = recall@k = 1[r ≤ k]      precision@k = 1[r ≤ k] / k
    MRR = 1 / r                          MAP@k = 1[r ≤ k] / r

averaged over users. Every user's value is in [0, 1], which a private release of the mean relies on
(`queries.metrics`). Metrics of whole lists (coverage, novelty) describe the recommended items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DEPTH = 10  # default number of recommended items
FEW_VALUES = 256  # maximum number of distinct values for which bootstrap counts are drawn directly


@dataclass(frozen=True)
class Metric:
    """A mean over users of a value in [0, 1] that depends only on the rank of the user's held-out item."""

    name: str
    title: str
    of_user: Callable[[Tensor, int], Tensor]  # ranks (…), k → values (…), float64
    cut: bool = True  # cut off at k; otherwise the whole ranking counts
    shown: bool = True  # whether `dpformer evaluate` shows it by default
    tracked: bool = False  # whether it is measured during training, and shown where space is limited
    released: bool = False  # whether it is part of private metrics

    def label(self, k: int = DEPTH) -> str:
        """Its name in files, such as ndcg@10."""
        return f"{self.name}@{k}" if self.cut else self.name

    def heading(self, k: int = DEPTH) -> str:
        """Its name for people, such as NDCG@10."""
        return f"{self.title}@{k}" if self.cut else self.title

    def __call__(self, ranks: Tensor, k: int = DEPTH) -> Tensor:
        """Mean over the last dimension, float64."""
        if ranks.shape[-1] == 0:
            raise ValueError("there are no users to average over")
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        return self.of_user(ranks, k).mean(dim=-1)


@dataclass(frozen=True)
class ListMetric:
    """A property of the lists of `DEPTH` items that all users get."""

    name: str
    sentence: str  # for people, with {value} and {k}
    of_lists: Callable[[np.ndarray, np.ndarray], float]
    # number of users' lists with each item (M,), occurrences of each in training (M,) → value

    @property
    def label(self) -> str:
        return f"{self.name}@{DEPTH}"

    def words(self, value: float) -> str:
        """The value in a sentence."""
        return self.sentence.format(value=value, k=DEPTH)


METRICS: dict[str, Metric] = {}
LIST_METRICS: dict[str, ListMetric] = {}


def register(metric: Metric | ListMetric) -> None:
    """Add a metric to the table; a name that is taken is refused."""
    if metric.name in METRICS or metric.name in LIST_METRICS:
        raise ValueError(f"a metric {metric.name!r} already exists")
    if isinstance(metric, Metric):
        METRICS[metric.name] = metric
    else:
        LIST_METRICS[metric.name] = metric


def tracked() -> list[Metric]:
    """The metrics measured during training; the first one is used to compare models."""
    return [metric for metric in METRICS.values() if metric.tracked]


def released() -> list[Metric]:
    """The metrics that private metrics release."""
    return [metric for metric in METRICS.values() if metric.released]


def shown(names: Iterable[str] | None = None) -> list[Metric]:
    """Metrics by name, in the order of the table; by default those shown by default."""
    if names is None:
        return [metric for metric in METRICS.values() if metric.shown]
    chosen = set(names)
    if unknown := sorted(chosen - METRICS.keys()):
        raise ValueError(f"unknown metric {unknown[0]!r}; known are {', '.join(METRICS)}")
    return [metric for metric in METRICS.values() if metric.name in chosen]


def headline() -> Metric:
    """The metric by which models are compared."""
    return tracked()[0]


def _within(ranks: Tensor, k: int) -> Tensor:
    return (ranks <= k).double()


def _gain(ranks: Tensor, k: int) -> Tensor:
    return torch.where(ranks <= k, 1 / torch.log2(ranks.double() + 1), 0.0)


def _coverage(listed: np.ndarray, counts: np.ndarray) -> float:
    return float((listed > 0).mean())


def _novelty(listed: np.ndarray, counts: np.ndarray) -> float:
    """Mean −log2 of an item's share of all interactions, over the recommended items; unseen items as if seen once."""
    share = np.maximum(counts, 1) / max(counts.sum(), 1)
    return float(-(listed * np.log2(share)).sum() / max(listed.sum(), 1))


ndcg = Metric("ndcg", "NDCG", _gain, tracked=True, released=True)
hit = Metric("hit", "HIT", _within, tracked=True, released=True)
mrr = Metric("mrr", "MRR", lambda ranks, k: 1 / ranks.double(), cut=False)
recall = Metric("recall", "Recall", _within, shown=False)
precision = Metric("precision", "Precision", lambda ranks, k: _within(ranks, k) / k, shown=False)
average_precision = Metric("map", "MAP", lambda ranks, k: _within(ranks, k) / ranks.double(), shown=False)
for _metric in (ndcg, hit, mrr, recall, precision, average_precision):
    register(_metric)
register(
    ListMetric(
        "coverage",
        "Coverage: {value:.1%} of the items are recommended to at least one user in a list of {k}.",
        _coverage,
    )
)
register(
    ListMetric(
        "novelty",
        "Novelty: a recommended item carries {value:.1f} bits (−log2 of its share of interactions).",
        _novelty,
    )
)


def bootstrap(
    metric: Callable[[Tensor], Tensor], ranks: Tensor, *, confidence: float = 0.95, samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """A percentile confidence interval of a metric of ranks (U,): users are resampled with replacement.

    The metric is a mean over users, so each user's value is computed once. The interval shows the variation between
    users, not between training runs.
    """
    if not len(ranks):
        raise ValueError("there are no users to average over")
    of_user = metric(ranks[:, None]).numpy()  # (U,): the value of each user
    values, counts = np.unique(of_user, return_counts=True)
    random = np.random.default_rng(seed)
    if len(values) <= FEW_VALUES:  # counts of each value are multinomial, so no user has to be drawn
        means = random.multinomial(len(of_user), counts / counts.sum(), samples) @ values / len(of_user)
    else:
        means = np.array([of_user[random.integers(0, len(of_user), len(of_user))].mean() for _ in range(samples)])
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail]).tolist()
    return low, high
