"""Evaluation of a recommender on held-out items: full ranking, under three policies for items of the history.

The headline measures what is served: `recommend` never returns an item of the history, so a held-out item that is in
the history is a miss; with `filter_seen=False` (`--allow-seen`) it ranks everything. Papers rank the held-out item in
any case and exclude the rest of the history, which rewards recommending seen items wherever items repeat.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpformer.data.dataset import Dataset
from dpformer.errors import DpformerError
from dpformer.evaluation.metrics import DEPTH, LIST_METRICS, bootstrap, shown
from dpformer.evaluation.rankers import TOKENS_AT_ONCE, DenseRanker, Histories, KnownItems, Ranker, ScoreFunction
from dpformer.evaluation.ranking import NEVER
from dpformer.evaluation.sparse_ranker import SparseRanker
from dpformer.progress import advance, stage

USERS_AT_ONCE = 1 << 13
POLICIES = {
    "served": "as recommend: items of the history are excluded, so a target among them is a miss",
    "unmasked": "as recommend --allow-seen: all items are ranked, including those of the history",
    "masked": "as in papers: items of the history are excluded, except the target",
}


class ServedRanks(NamedTuple):
    """The ranks of held-out items among recommendations."""

    ranks: Tensor  # (U,) int64
    repeats: np.ndarray  # (U,) bool: the item is in the user's history


@dataclass(frozen=True)
class Evaluation:
    """Ranks of the held-out items of `users` under each policy, and their metrics."""

    users: np.ndarray  # (U,) int64
    targets: np.ndarray  # (U,) int64
    masked: Tensor  # (U,) int64
    unmasked: Tensor  # (U,) int64
    repeats: np.ndarray  # (U,) bool: the target is in the user's history
    listed: np.ndarray  # (M,) int64: number of users with the item among their DEPTH best, by the policy of `headline`
    counts: np.ndarray  # (M,) int64: occurrences of each item in training
    split: str
    filter_seen: bool = True

    @property
    def num_items(self) -> int:
        return len(self.counts)

    @property
    def served(self) -> Tensor:
        """(U,) int64: as `masked`, but a target in the user's history is never recommended."""
        return self.masked.masked_fill(torch.from_numpy(self.repeats), NEVER)

    @property
    def headline(self) -> str:
        """The policy of what is recommended."""
        return "served" if self.filter_seen else "unmasked"

    @property
    def ranks(self) -> Tensor:
        """(U,) int64: the rank of each target in the recommendations."""
        return self.served if self.filter_seen else self.unmasked

    @property
    def of_lists(self) -> dict[str, float]:
        """The metrics of all recommended lists together."""
        return {metric.label: metric.of_lists(self.listed, self.counts) for metric in LIST_METRICS.values()}

    def measured(self, name: str) -> dict[str, np.ndarray]:
        """The measured arrays, for storing under a name."""
        found = {"masked": self.masked.numpy(), "unmasked": self.unmasked.numpy()}
        return {
            f"{name}-{of}": values for of, values in (found | {"repeats": self.repeats, "listed": self.listed}).items()
        }

    @classmethod
    def of(
        cls, dataset: Dataset, split: str, filter_seen: bool, kept: Mapping[str, np.ndarray], name: str
    ) -> "Evaluation":
        """The inverse of `measured`, with the same data and options."""
        masked, unmasked = (torch.from_numpy(kept[f"{name}-{of}"]) for of in ("masked", "unmasked"))
        others = kept[f"{name}-repeats"], kept[f"{name}-listed"]
        return cls(*dataset.held_out(split), masked, unmasked, *others, dataset.item_counts(), split, filter_seen)

    def metrics(
        self, ks: Sequence[int] = (DEPTH,), *, samples: int = 1000, names: Sequence[str] | None = None
    ) -> dict[str, dict[str, dict[str, float]]]:
        """policy → metric → {value, low, high}: means over users with 95% bootstrap intervals.

        `names` are names in the metric table; by default those shown by default.
        """
        table: dict[str, dict[str, dict[str, float]]] = {}
        chosen = {metric.label(k): (metric, k) for k in ks for metric in shown(names) if metric.cut}
        chosen |= {metric.label(): (metric, DEPTH) for metric in shown(names) if not metric.cut}
        for policy in sorted(POLICIES, key=lambda name: name != self.headline):
            table[policy], of = {}, getattr(self, policy)
            for label, (metric, k) in chosen.items():
                low, high = bootstrap(partial(metric, k=k), of, samples=samples)
                table[policy][label] = {"value": float(metric(of, k)), "low": low, "high": high}
        return table

    def to_dict(
        self, ks: Sequence[int] = (DEPTH,), *, samples: int = 1000, names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Everything a reader needs, as JSON: what was ranked and how, over how many users, and the result."""
        return {
            "split": self.split,
            "users": len(self.users),
            "ranking": f"full ranking over {self.num_items} items, ties pessimistic",
            "headline_policy": self.headline,
            "policies": POLICIES,
            "repeats": float(self.repeats.mean()),
            **self.of_lists,
            "interval": "95% bootstrap over users",
            "metrics": self.metrics(ks, samples=samples, names=names),
        }


def evaluate(
    score: Ranker | ScoreFunction,
    dataset: Dataset,
    *,
    split: str = "test",
    users: np.ndarray | None = None,
    filter_seen: bool = True,
) -> Evaluation:
    """Rank the held-out item of each user given all earlier items of that user.

    Args:
        score: a ranker (`ranker` makes that of a model), or any function of the full histories of some users that
            returns finite scores (B, num_items).
        dataset: the data set with the held-out items.
        split: `test` or `validation`.
        users: only these; by default all with a held-out item.
        filter_seen: whether recommendations exclude items of the history.
    """
    everyone, items = dataset.held_out(split)
    chosen = np.ones(len(everyone), dtype=bool) if users is None else np.isin(everyone, users)
    everyone, items = everyone[chosen], items[chosen]
    if not len(everyone):
        raise DpformerError("no user has a held-out item: histories of at least 3 items are needed")
    placing = score if isinstance(score, Ranker) else DenseRanker(score, dataset.num_items)
    parts, repeats, listed = [], [], np.zeros(dataset.num_items, dtype=np.int64)
    with stage("ranking held-out items", len(everyone)):
        for start in range(0, len(everyone), USERS_AT_ONCE):
            part = slice(start, start + USERS_AT_ONCE)
            histories = Histories(*dataset.packed_held_out(everyone[part], split))
            found = placing.place(histories, items[part], min(DEPTH, dataset.num_items), allow_seen=not filter_seen)
            parts.append(found)
            repeats.append(_met_before(histories, items[part]))
            listed += np.bincount(found.first[found.first >= 0], minlength=dataset.num_items)
            advance(len(histories))
    ranks = [np.concatenate([getattr(part, name) for part in parts]) for name in ("masked", "unmasked")]
    if isinstance(placing, KnownItems):  # a model never recommends items that it lacks
        ranks = [np.where(placing.numbers[items] >= 0, of, NEVER) for of in ranks]
    masked, unmasked = (torch.from_numpy(of) for of in ranks)
    again = np.concatenate(repeats)
    return Evaluation(everyone, items, masked, unmasked, again, listed, dataset.item_counts(), split, filter_seen)


def _met_before(histories: Histories, targets: np.ndarray) -> np.ndarray:
    """(B,) bool: whether the target is in the history."""
    rows = histories.rows
    return np.bincount(rows[histories.items == targets[rows]], minlength=len(targets)) > 0


def scorer(model: Any) -> ScoreFunction:
    """The scores of a model, computed for as many users at a time as fit into little memory."""

    def score(histories: list[np.ndarray]) -> Tensor:
        size = max(1, TOKENS_AT_ONCE // getattr(model, "max_length", 200))
        order = np.argsort([len(history) for history in histories], kind="stable")  # less padding
        scores = torch.empty(len(histories), model.num_items)
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            scores[torch.from_numpy(rows)] = model.scores([histories[row] for row in rows]).to(scores)
        return scores

    return score


def popularity(dataset: Dataset) -> SparseRanker:
    """The baseline: items by their frequency in training, the same for everyone. Not private."""
    return SparseRanker(dataset.item_counts().astype(np.float64))
