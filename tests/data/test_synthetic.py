"""The synthetic default: the same for a seed, long-tailed, and worth learning."""

import numpy as np
import pytest
import torch

from dpformer.data import Dataset, synthetic
from dpformer.evaluation import evaluate, hit, ndcg, popularity
from dpformer.statement.data import data_statement


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return synthetic()


def test_a_seed_fixes_it(dataset: Dataset) -> None:
    small = {"users": 50, "items": 100}
    assert synthetic(3, **small).hash == synthetic(3, **small).hash != synthetic(4, **small).hash
    assert (dataset.num_users, dataset.num_items) == (6000, 400)
    assert dataset.vocabulary.policy == "catalog" and dataset.titles is not None
    assert "public catalogue" in " ".join(data_statement(dataset.description))
    with pytest.raises(ValueError, match="at least 2 users and 80 items"):
        synthetic(users=1)


def test_it_is_long_tailed_and_nobody_meets_an_item_twice(dataset: Dataset) -> None:
    counts = np.sort(dataset.item_counts())[::-1]
    assert counts[:40].sum() > 0.35 * counts.sum() and counts[0] > 50 * counts[-1] > 0
    users = np.repeat(np.arange(dataset.num_users), dataset.lengths)
    assert len(np.unique(users * dataset.num_items + dataset.items)) == dataset.num_interactions
    assert dataset.lengths.min() == 12 and dataset.lengths.max() == 40


def transitions(dataset: Dataset) -> torch.Tensor:
    """What follows what, counted in training."""
    items, offsets = dataset.packed_train()
    inside = np.ones(len(items) - 1, dtype=bool)
    inside[offsets[1:-1] - 1] = False  # no pair across two users
    counts = np.zeros((dataset.num_items, dataset.num_items))
    np.add.at(counts, (items[:-1][inside], items[1:][inside]), 1)
    return torch.from_numpy(counts / (counts.sum(axis=1, keepdims=True) + 30))


def test_order_tells_more_than_popularity_and_popularity_more_than_chance(dataset: Dataset) -> None:
    table, generator = transitions(dataset), torch.Generator().manual_seed(0)

    def last_item(histories: list[np.ndarray]) -> torch.Tensor:
        return table[[int(history[-1]) for history in histories]]

    def chance(histories: list[np.ndarray]) -> torch.Tensor:
        return torch.rand(len(histories), dataset.num_items, generator=generator)

    found = [evaluate(score, dataset).masked for score in (chance, popularity(dataset), last_item)]
    by_chance, by_popularity, by_order = (float(ndcg(rank, 10)) for rank in found)
    assert by_chance < 0.02 and by_popularity > 4 * by_chance and by_order > 2.5 * by_popularity
    assert float(hit(found[2], 10)) > 0.5
