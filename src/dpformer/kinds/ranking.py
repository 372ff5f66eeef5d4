"""Rankers of models, by kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dpformer.data.dataset import Dataset
from dpformer.data.vocabulary import Vocabulary
from dpformer.evaluation.evaluate import ServedRanks, evaluate
from dpformer.evaluation.rankers import KnownItems, Ranker
from dpformer.kinds.registry import kind_of


def ranker(model: Any, dataset: Dataset | None = None, vocabulary: Vocabulary | None = None) -> Ranker:
    """The ranker of a model.

    If the data has items that the model lacks, `vocabulary` names the data's: histories are passed without these items,
    and they rank below all known ones, because items that were not released cannot be recommended.
    """
    found = kind_of(model).ranker(model)
    if dataset is not None and vocabulary is not None and len(vocabulary) != dataset.num_items:
        return KnownItems(found, vocabulary.match(list(dataset.vocabulary.ids)))
    return found


def served_ranks(
    model: Any,
    dataset: Dataset,
    split: str = "test",
    vocabulary: Vocabulary | None = None,
    *,
    filter_seen: bool = True,
) -> ServedRanks:
    """Ranks of the held-out items among recommendations, of no user if there are none. Not private."""
    if not len(dataset.held_out(split)[0]):
        return ServedRanks(torch.zeros(0, dtype=torch.int64), np.zeros(0, dtype=bool))
    found = evaluate(ranker(model, dataset, vocabulary), dataset, split=split, filter_seen=filter_seen)
    return ServedRanks(found.ranks, found.repeats)
