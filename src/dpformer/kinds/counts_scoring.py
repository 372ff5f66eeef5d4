"""Scores of transition counts, their explanations, and similar items, by sparse products."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import diags_array

from dpformer.models.counts import TransitionCounts
from dpformer.models.evidence import Evidence

ADDED = "share of the evidence contributed by each item of the history; the rest is the item's popularity"


class CountsScoring:
    """Evidence for every item by sparse products; the score is its logarithm."""

    quick = True  # sparse products and topk release Python's lock
    method = ADDED

    def __init__(self, model: TransitionCounts) -> None:
        self.evidence, self.names = Evidence(model), model.attribute_names

    def scores(self, items: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return self.evidence.of(items, offsets)

    def shown(self, ranked: np.ndarray) -> np.ndarray:
        return np.where(ranked > 0, np.log(np.maximum(ranked, np.finfo(np.float32).tiny)), -np.inf)

    def contributions(self, history: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Shares, which sum to 1 together with popularity's."""
        added = self.evidence.parts(history, items)
        shares = added / added.sum(0)
        return shares[:-1], shares[-1]

    def attributes_behind(self, history: np.ndarray, items: np.ndarray) -> list[list[str | None]]:
        numbers = self.evidence.attributes_behind(history, items).tolist()
        return [[None if one < 0 else ": ".join(self.names[one]) for one in row] for row in numbers]

    def profiles(self) -> Any:
        rows = self.evidence.transitions
        rows = rows - diags_array(rows.diagonal())  # every item has the same weight of repeats
        norms = np.sqrt(rows.multiply(rows).sum(1))
        return rows.multiply(1 / np.maximum(norms, 1e-30)[:, None]).tocsr()
