"""Scores of a released model: for recommendations, explanations, and similar items."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from dpformer.evaluation.evaluate import scorer
from dpformer.evaluation.ranking import NonFiniteScores

LEFT_OUT = "decrease of the score when the item is removed from the history"


class Scoring(Protocol):
    """What differs between kinds of models. Histories are packed: items[offsets[b]:offsets[b + 1]], oldest first."""

    quick: bool  # whether one answer takes well under a millisecond, and may run in several threads
    method: str  # the meaning of `contributions`

    def scores(self, items: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(B, M) scores for ranking."""

    def shown(self, ranked: np.ndarray) -> np.ndarray:
        """The displayed form of some `scores`; −∞ for items that must not be recommended."""

    def contributions(self, history: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The contribution of each position of a history to each item, (L, n), and of popularity, (n,)."""

    def attributes_behind(self, history: np.ndarray, items: np.ndarray) -> list[list[str | None]]:
        """The name of the public attribute behind each contribution, (L, n); None if it is the item itself."""

    def profiles(self) -> Any:
        """(M, ·) rows of length 1, or 0 for unknown items; an array or a sparse matrix."""


class DenseScoring:
    """Any model with `scores`: contributions by leaving a position out, and softmax rows as profiles."""

    quick = False  # a network uses threads of its own
    method = LEFT_OUT

    def __init__(self, model: Any) -> None:
        self.model = model

    def scores(self, items: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            scores = scorer(self.model)(np.split(items, offsets[1:-1]))
        if not bool(torch.isfinite(scores).all()):
            raise NonFiniteScores("the model's scores are not finite: training has diverged")
        return scores.numpy()

    def shown(self, ranked: np.ndarray) -> np.ndarray:
        return ranked

    def contributions(self, history: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The changes of the score, which have no fixed sum; popularity's is NaN."""
        without = [history, *(np.delete(history, place) for place in range(len(history)))]
        with torch.no_grad():
            scores = scorer(self.model)(without)[:, torch.from_numpy(items)].double().numpy()
        return scores[0] - scores[1:], np.full(len(items), np.nan)

    def attributes_behind(self, history: np.ndarray, items: np.ndarray) -> list[list[str | None]]:
        return [[None] * len(items) for _ in history]

    def profiles(self) -> Any:
        vectors = self.model.output_weight().detach().cpu().numpy()
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
