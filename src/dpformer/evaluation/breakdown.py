"""Where a model is right: accuracy by the popularity of the held-out item, and what should worry its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dpformer.evaluation.evaluate import Evaluation
from dpformer.evaluation.metrics import headline, tracked

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


def by_popularity(found: Mapping[str, Evaluation], k: int) -> list[dict[str, Any]]:
    """Accuracy of what is recommended, apart for held-out items of each part; a part that no user tests is left out.

    Args:
        found: of some models for the same users, by name.
        k: length of the list.
    """
    of_any = next(iter(found.values()))
    parts, rows = popularity_parts(of_any.counts), []
    for number, name in enumerate(PARTS):
        chosen = torch.from_numpy(np.flatnonzero(parts[of_any.targets] == number))
        if not len(chosen):
            continue
        row: dict[str, Any] = {"part": name, "items": int((parts == number).sum()), "users": len(chosen)}
        for who, evaluation in found.items():
            ranks = evaluation.ranks[chosen]
            row[who] = {metric.label(k): float(metric(ranks, k)) for metric in tracked()}
        rows.append(row)
    return rows


def warnings(model: Evaluation, baseline: Evaluation, name: str, ks: Sequence[int]) -> list[str]:
    """Sentences on what should not be overlooked; `name` is that of the baseline."""
    said, metric = [], headline()
    for k in ks:
        ours, theirs = float(metric(model.ranks, k)), float(metric(baseline.ranks, k))
        if ours < theirs:
            said.append(
                f"The model is below {name}, which knows nothing of the user: {metric.heading(k)} {ours:.4f} against "
                f"{theirs:.4f}. More users, a larger ε or a catalogue with attributes may help."
            )
    repeats = float(model.repeats.mean())
    if model.filter_seen and repeats >= MANY_REPEATS:
        said.append(
            f"{repeats:.0%} of the held-out items are in the history, and are never recommended: see --allow-seen, and "
            "whether rows of the log are doubled."
        )
    return said
