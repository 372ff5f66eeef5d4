"""Popularity, the baseline: items by how often they occur in training, the same for everybody. Exact, not private."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpformer.data import Dataset
    from dpformer.evaluation.rankers import Ranker


class PopularityBaseline:
    """What every model is compared with."""

    name = "popularity"
    title = "popularity, exact counts"
    knows = "nothing of the user"

    def ranker(self, dataset: Dataset) -> Ranker:
        """Places held-out items."""
        from dpformer.evaluation.evaluate import popularity

        return popularity(dataset)


BASELINE = PopularityBaseline()
