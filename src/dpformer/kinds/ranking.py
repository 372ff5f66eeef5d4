"""Rankers of models, by their kind."""

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

    A model that has fewer items than the data, `vocabulary`, gets histories without the others, and these stand after
    all that it knows: what was not released cannot be recommended.
    """
    found = kind_of(model).ranker(model)
    if dataset is not None and vocabulary is not None and len(vocabulary) != dataset.num_items:
        return KnownItems(found, vocabulary.match(list(dataset.vocabulary.ids)))
    return found


def served_ranks(model: Any, dataset: Dataset, split: str = "test", vocabulary: Vocabulary | None = None) -> Tensor:
    """(U,) ranks of the held-out items in what is recommended; (0,) where nobody has one. Not private."""
    if not len(dataset.held_out(split)[0]):
        return torch.zeros(0, dtype=torch.int64)
    return evaluate(ranker(model, dataset, vocabulary), dataset, split=split).served
