"""Rankers of models, by kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpformer.data.dataset import Dataset
from dpformer.data.vocabulary import Vocabulary
from dpformer.evaluation.evaluate import evaluate
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


def served_ranks(model: Any, dataset: Dataset, split: str = "test", vocabulary: Vocabulary | None = None) -> Tensor:
    """(U,) ranks of the held-out items among recommendations; (0,) if there are none. Not private."""
    if not len(dataset.held_out(split)[0]):
        return torch.zeros(0, dtype=torch.int64)
    return evaluate(ranker(model, dataset, vocabulary), dataset, split=split).served
