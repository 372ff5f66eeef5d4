"""Evaluation of a recommender on held-out items: full ranking, seen items masked and not, both reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.data.dataset import Dataset
from dpformer.data.vocabulary import Vocabulary
from dpformer.errors import DpformerError
from dpformer.evaluation.ranking import bootstrap, hit, mrr, ndcg, ranks

ScoreFunction = Callable[[list[np.ndarray]], Tensor]  # histories of B users → scores (B, M)
SCORES_AT_ONCE = 1 << 24
TOKENS_AT_ONCE = 1 << 15
POLICIES = {
    "masked": "items the user has met are not ranked, but for the target",
    "unmasked": "all items are ranked, those the user has met too",
}


@dataclass(frozen=True)
class Evaluation:
    """Ranks of the held-out items of `users`, under both policies, and the metrics of them."""

    users: np.ndarray  # (U,) int64
    targets: np.ndarray  # (U,) int64
    masked: Tensor  # (U,) int64
    unmasked: Tensor  # (U,) int64
    num_items: int
    split: str

    def metrics(self, ks: Sequence[int] = (10,), *, samples: int = 1000) -> dict[str, dict[str, dict[str, float]]]:
        """policy → metric → {value, low, high}: means over users with 95% bootstrap intervals."""
        functions: dict[str, Callable[[Tensor], Tensor]] = {}
        for k in ks:
            functions[f"ndcg@{k}"] = lambda r, k=k: ndcg(r, k)  # type: ignore[misc]
            functions[f"hit@{k}"] = lambda r, k=k: hit(r, k)  # type: ignore[misc]
        functions["mrr"] = mrr
        table: dict[str, dict[str, dict[str, float]]] = {}
        for policy, of in (("masked", self.masked), ("unmasked", self.unmasked)):
            table[policy] = {}
            for name, function in functions.items():
                low, high = bootstrap(function, of, samples=samples)
                table[policy][name] = {"value": float(function(of)), "low": low, "high": high}
        return table

    def to_dict(self, ks: Sequence[int] = (10,), *, samples: int = 1000) -> dict[str, Any]:
        """Everything a reader needs, as JSON: what was ranked how, over how many users, with what result."""
        return {
            "split": self.split,
            "users": len(self.users),
            "ranking": f"full ranking over {self.num_items} items, ties pessimistic",
            "policies": POLICIES,
            "interval": "95% bootstrap over users",
            "metrics": self.metrics(ks, samples=samples),
        }


def evaluate(
    score: ScoreFunction, dataset: Dataset, *, split: str = "test", users: np.ndarray | None = None
) -> Evaluation:
    """Ranks the held-out item of each user given every earlier item of that user.

    Args:
        score: gets the histories of some users, whole, and returns finite scores (B, num_items).
        dataset: where the held-out items are.
        split: `test` or `validation`.
        users: only these; by default all that have something held out.
    """
    everyone, items = dataset.held_out(split)
    chosen = np.ones(len(everyone), dtype=bool) if users is None else np.isin(everyone, users)
    everyone, items = everyone[chosen], items[chosen]
    if not len(everyone):
        raise DpformerError("no user has a held-out item: histories of at least 3 items are needed")
    chunk = max(1, SCORES_AT_ONCE // dataset.num_items)
    masked, unmasked = [], []
    for start in range(0, len(everyone), chunk):
        part, target = everyone[start : start + chunk], torch.from_numpy(items[start : start + chunk])
        histories = dataset.held_out_histories(part, split)
        with torch.no_grad():
            scores = score(histories).cpu()
        if scores.shape != (len(part), dataset.num_items):
            raise ValueError(f"scores have shape {tuple(scores.shape)}, not {(len(part), dataset.num_items)}")
        unmasked.append(ranks(scores, target))
        masked.append(unmasked[-1] - _seen_ahead(scores, target, histories))
    return Evaluation(everyone, items, torch.cat(masked), torch.cat(unmasked), dataset.num_items, split)


def scorer(model: Any, dataset: Dataset | None = None, vocabulary: Vocabulary | None = None) -> ScoreFunction:
    """The scores of a model, computed for so many users at a time as fit into little memory.

    A model that has fewer items than the data, `vocabulary`, gets histories without the others, and scores these below
    all that it knows: what was not released cannot be recommended.
    """
    if dataset is not None and vocabulary is not None and len(vocabulary) != dataset.num_items:
        return _below_all_known(scorer(model), vocabulary.match(list(dataset.vocabulary.ids)))

    def score(histories: list[np.ndarray]) -> Tensor:
        size = max(1, TOKENS_AT_ONCE // getattr(model, "max_length", 200))
        order = np.argsort([len(history) for history in histories], kind="stable")  # less padding
        scores = torch.empty(len(histories), model.num_items)
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            scores[torch.from_numpy(rows)] = model.scores([histories[row] for row in rows]).to(scores)
        return scores

    return score


def _below_all_known(score: ScoreFunction, numbers: np.ndarray) -> ScoreFunction:
    """Scores of all items of the data from those of a model; `numbers` (items,) are the model's, -1 for none."""
    known = torch.from_numpy(np.flatnonzero(numbers >= 0))

    def wider(histories: list[np.ndarray]) -> Tensor:
        mapped = [numbers[history] for history in histories]
        found = score([history[history >= 0] for history in mapped])
        scores = found.min(1, keepdim=True).values.expand(-1, len(numbers)) - 1
        return scores.clone().index_copy_(1, known, found[:, torch.from_numpy(numbers[known.numpy()])])

    return wider


def masked_ranks(model: Any, dataset: Dataset, split: str = "test", vocabulary: Vocabulary | None = None) -> Tensor:
    """(U,) ranks of the held-out items, seen ones masked; (0,) where nobody has one. Not private."""
    if not len(dataset.held_out(split)[0]):
        return torch.zeros(0, dtype=torch.int64)
    return evaluate(scorer(model, dataset, vocabulary), dataset, split=split).masked


def _seen_ahead(scores: Tensor, targets: Tensor, histories: list[np.ndarray]) -> Tensor:
    """How many distinct items of each history stand before its target, (B,): rank minus this is the masked rank."""
    rows = np.repeat(np.arange(len(histories)), [len(history) for history in histories])
    pairs = np.unique(rows * scores.shape[1] + np.concatenate(histories))  # each (row, item) once
    row, item = (torch.from_numpy(part) for part in np.divmod(pairs, scores.shape[1]))
    ahead = (scores[row, item] >= scores[row, targets[row]]) & (item != targets[row])
    return torch.bincount(row[ahead], minlength=len(histories))


def popularity(dataset: Dataset) -> ScoreFunction:
    """The baseline: items by how often they occur in training, the same for everybody. Not private."""
    counts = torch.from_numpy(dataset.item_counts()).float()
    return lambda histories: counts.expand(len(histories), -1)
