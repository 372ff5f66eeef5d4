"""Where a model is right: accuracy by the popularity of the held-out item, and what should worry its owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dpformer.evaluation.evaluate import Evaluation
from dpformer.evaluation.ranking import hit, ndcg

PARTS = ("head", "middle", "tail")
MANY_REPEATS = 0.5  # share of held-out items above which a log is more about repeats than about what is new


def popularity_parts(counts: np.ndarray) -> np.ndarray:
    """0, 1, 2 for each item (M,): the most popular items that have a third of all interactions, the next, the rest.

    >>> popularity_parts(np.array([6, 2, 2, 3, 1, 1, 3, 0]))
    array([0, 2, 2, 1, 2, 2, 1, 2])
    """
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    parts = np.empty(len(counts), dtype=np.int64)
    parts[order] = np.minimum(3 * before // max(1, counts.sum()), 2)
    parts[counts == 0] = 2
    return parts


def by_popularity(model: Evaluation, popularity: Evaluation, counts: np.ndarray, k: int) -> list[dict[str, Any]]:
    """Accuracy of what is recommended, apart for held-out items of each part; a part that no user tests is left out.

    Args:
        model: of the model.
        popularity: of popularity, for the same users.
        counts: (M,) interactions of each item in training.
        k: length of the list.
    """
    parts, rows = popularity_parts(counts), []
    for number, name in enumerate(PARTS):
        chosen = torch.from_numpy(np.flatnonzero(parts[model.targets] == number))
        if not len(chosen):
            continue
        row: dict[str, Any] = {"part": name, "items": int((parts == number).sum()), "users": len(chosen)}
        for who, found in (("model", model.ranks[chosen]), ("popularity", popularity.ranks[chosen])):
            row[who] = {f"ndcg@{k}": float(ndcg(found, k)), f"hit@{k}": float(hit(found, k))}
        rows.append(row)
    return rows


def warnings(model: Evaluation, popularity: Evaluation, ks: Sequence[int]) -> list[str]:
    """Sentences on what should not be overlooked."""
    said = []
    for k in ks:
        ours, theirs = float(ndcg(model.ranks, k)), float(ndcg(popularity.ranks, k))
        if ours < theirs:
            said.append(
                f"The model is below popularity, which knows nothing of the user: NDCG@{k} {ours:.4f} against "
                f"{theirs:.4f}. More users, a larger ε or a catalogue with attributes may help."
            )
    repeats = float(model.repeats.mean())
    if model.filter_seen and repeats >= MANY_REPEATS:
        said.append(
            f"{repeats:.0%} of the held-out items are in the history, and are never recommended: see --allow-seen, and "
            "whether rows of the log are doubled."
        )
    return said
