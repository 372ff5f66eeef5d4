"""Accuracy by the popularity of the held-out item, and warnings for the owner of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dpformer.evaluation.evaluate import Evaluation
from dpformer.evaluation.metrics import headline, tracked

PARTS = ("head", "middle", "tail")
KNOWN, NEW_ITEM, NEW_USER = "item in training", "new item", "new user"
MANY_REPEATS = 0.5  # share of held-out items above which a log is mostly about repeats


def popularity_parts(counts: np.ndarray) -> np.ndarray:
    """0, 1, 2 for each item (M,): the most popular items with a third of all interactions, the next third, the rest.

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
    """Accuracy of recommendations by the popularity part of the held-out item; parts without users are omitted.

    Args:
        found: evaluations of several models for the same users, by name.
        k: cut-off of the ranking.
    """
    of_any = next(iter(found.values()))
    parts, rows = popularity_parts(of_any.counts), []
    for number, name in enumerate(PARTS):
        row = {"part": name, "items": int((parts == number).sum())}
        rows += _row(row, found, parts[of_any.targets] == number, k)
    return rows


def by_newness(warm: Mapping[str, Evaluation], cold: Mapping[str, Evaluation], k: int) -> list[dict[str, Any]]:
    """For a split by time: accuracy by whether user and item occur in training.

    Args:
        warm: for users with a history before the cut, by name of the model.
        cold: for users without one; empty if there are none.
        k: cut-off of the ranking.
    """
    of_any = next(iter(warm.values()))
    known = of_any.counts[of_any.targets] > 0
    rows = [*_row({"part": KNOWN}, warm, known, k), *_row({"part": NEW_ITEM}, warm, ~known, k)]
    if cold:
        everybody = np.ones(len(next(iter(cold.values())).users), dtype=bool)
        rows += _row({"part": NEW_USER}, cold, everybody, k)
    return rows


def _row(row: dict[str, Any], found: Mapping[str, Evaluation], chosen: np.ndarray, k: int) -> list[dict[str, Any]]:
    """The accuracy for some users as a row of a table; nothing if there are no such users."""
    if not chosen.any():
        return []
    of_users = {"users": int(chosen.sum())}
    metrics = {
        who: {metric.label(k): float(metric(evaluation.ranks[torch.from_numpy(chosen)], k)) for metric in tracked()}
        for who, evaluation in found.items()
    }
    return [{**row, **of_users, **metrics}]


def warnings(model: Evaluation, baseline: Evaluation, name: str, ks: Sequence[int]) -> list[str]:
    """Warnings that should not be overlooked; `name` is that of the baseline."""
    said, metric = [], headline()
    for k in ks:
        ours, theirs = float(metric(model.ranks, k)), float(metric(baseline.ranks, k))
        if ours < theirs:
            said.append(
                f"The model is below {name}, which ignores the user: {metric.heading(k)} {ours:.4f} against "
                f"{theirs:.4f}. More users, a larger ε or a catalogue with attributes may help."
            )
    repeats = float(model.repeats.mean())
    if model.filter_seen and repeats >= MANY_REPEATS:
        said.append(
            f"{repeats:.0%} of the held-out items are in the history and are never recommended: consider --allow-seen, "
            "and check the log for duplicate rows."
        )
    return said
