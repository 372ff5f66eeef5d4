"""Evaluation of a recommender on held-out items: full ranking, under three policies on what the user has met before.

What counts is what is served: `recommend` never gives an item of the history, so a held-out item that the user had met
before is missed; with `filter_seen=False` (`--allow-seen`) it ranks everything. Papers rank the held-out item in any
case and leave out the rest of the history, which rewards recommending what was seen wherever items repeat.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    "served": "what recommend gives: never an item of the history, so a target among them is missed",
    "unmasked": "what recommend --allow-seen gives: all items are ranked, those the user has met too",
    "masked": "as papers do: items the user has met are not ranked, but for the target",
}


@dataclass(frozen=True)
class Evaluation:
    """Ranks of the held-out items of `users`, under each policy, and the metrics of them."""

    users: np.ndarray  # (U,) int64
    targets: np.ndarray  # (U,) int64
    masked: Tensor  # (U,) int64
    unmasked: Tensor  # (U,) int64
    repeats: np.ndarray  # (U,) bool: the user had met the target before
    listed: np.ndarray  # (M,) int64: of how many users' DEPTH best items it is one, by the policy of `headline`
    counts: np.ndarray  # (M,) int64: how often each item occurs in training
    split: str
    filter_seen: bool = True

    @property
    def num_items(self) -> int:
        return len(self.counts)

    @property
    def served(self) -> Tensor:
        """(U,) int64: as `masked`, but a target that the user had met before is never recommended."""
        return self.masked.masked_fill(torch.from_numpy(self.repeats), NEVER)

    @property
    def headline(self) -> str:
        """The policy of what is recommended."""
        return "served" if self.filter_seen else "unmasked"

    @property
    def ranks(self) -> Tensor:
        """(U,) int64: where each target stands in what is recommended."""
        return self.served if self.filter_seen else self.unmasked

    @property
    def of_lists(self) -> dict[str, float]:
        """The metrics of what is recommended to all users together."""
        return {metric.label: metric.of_lists(self.listed, self.counts) for metric in LIST_METRICS.values()}

    def measured(self, name: str) -> dict[str, np.ndarray]:
        """What was measured, to be kept under a name."""
        found = {"masked": self.masked.numpy(), "unmasked": self.unmasked.numpy()}
        return {
            f"{name}-{of}": values for of, values in (found | {"repeats": self.repeats, "listed": self.listed}).items()
        }

    @classmethod
    def of(
        cls, dataset: Dataset, split: str, filter_seen: bool, kept: Mapping[str, np.ndarray], name: str
    ) -> "Evaluation":
        """Back from `measured`, with the same data and options."""
        masked, unmasked = (torch.from_numpy(kept[f"{name}-{of}"]) for of in ("masked", "unmasked"))
        others = kept[f"{name}-repeats"], kept[f"{name}-listed"]
        return cls(*dataset.held_out(split), masked, unmasked, *others, dataset.item_counts(), split, filter_seen)

    def metrics(
        self, ks: Sequence[int] = (DEPTH,), *, samples: int = 1000, names: Sequence[str] | None = None
    ) -> dict[str, dict[str, dict[str, float]]]:
        """policy → metric → {value, low, high}: means over users with 95% bootstrap intervals.

        `names` are those of the table of metrics; by default those that are shown unasked.
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
        """Everything a reader needs, as JSON: what was ranked how, over how many users, with what result."""
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
    """Ranks the held-out item of each user given every earlier item of that user.

    Args:
        score: a ranker (`ranker` makes that of a model), or any function of the histories of some users, whole, that
            returns finite scores (B, num_items).
        dataset: where the held-out items are.
        split: `test` or `validation`.
        users: only these; by default all that have something held out.
        filter_seen: whether items of the history are left out of what is recommended.
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
    if isinstance(placing, KnownItems):  # what a model does not have it never recommends
        ranks = [np.where(placing.numbers[items] >= 0, of, NEVER) for of in ranks]
    masked, unmasked = (torch.from_numpy(of) for of in ranks)
    again = np.concatenate(repeats)
    return Evaluation(everyone, items, masked, unmasked, again, listed, dataset.item_counts(), split, filter_seen)


def _met_before(histories: Histories, targets: np.ndarray) -> np.ndarray:
    """(B,) bool: whether the target is in the history."""
    rows = histories.rows
    return np.bincount(rows[histories.items == targets[rows]], minlength=len(targets)) > 0


def scorer(model: Any) -> ScoreFunction:
    """The scores of a model, computed for so many users at a time as fit into little memory."""

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
    """The baseline: items by how often they occur in training, the same for everybody. Not private."""
    return SparseRanker(dataset.item_counts().astype(np.float64))
