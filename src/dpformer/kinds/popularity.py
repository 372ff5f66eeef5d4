"""Popularity, the baseline: items by their frequency in training, the same for everyone. Exact, not private."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpformer.data import Dataset
    from dpformer.evaluation.rankers import Ranker


class PopularityBaseline:
    """The baseline for every model."""

    name = "popularity"
    title = "popularity, exact counts"
    knows = "nothing of the user"

    def ranker(self, dataset: Dataset) -> Ranker:
        """The ranker of held-out items."""
        from dpformer.evaluation.evaluate import popularity

        return popularity(dataset)


BASELINE = PopularityBaseline()
