"""Attributes on small synthetic catalogues: never much worse than what is public alone, or than counts alone."""

import numpy as np
import pytest

import dpformer as dp
from dpformer.data import Attributes, Dataset
from dpformer.evaluation import evaluate, ndcg
from dpformer.kinds.ranking import ranker
from dpformer.models import TransitionCounts
from dpformer.models.confirmed import confirmation
from dpformer.queries.transitions.rounds import TransitionRelease, release_transitions

ITEMS, BRANDS, LENGTH = 300, 30, 7


def dataset(users: int, loyal: float, seed: int) -> Dataset:
    """Users who stay with a brand with this probability; popular items first within each."""
    random = np.random.default_rng(seed)
    favourite = random.integers(BRANDS, size=(users, 1))
    brand = np.where(random.random((users, LENGTH)) < loyal, favourite, random.integers(BRANDS, size=(users, LENGTH)))
    rank = (ITEMS // BRANDS) * random.random((users, LENGTH)) ** 2
    return Dataset.from_histories((brand + BRANDS * rank.astype(np.int64)).tolist(), ITEMS)


def brands() -> Attributes:
    return Attributes.of_items([[("brand", str(item % BRANDS))] for item in range(ITEMS)])


def accuracy(model: TransitionCounts, data: Dataset) -> float:
    return float(ndcg(evaluate(ranker(model), data, split="test").served, 10))


def fitted(data: Dataset, epsilon: float, attributes: Attributes | None, seed: int) -> TransitionCounts:
    items, offsets = data.packed_train()
    sigma = dp.calibrate(epsilon=epsilon, delta=1e-3, sample_rate=1.0, steps=1)
    return TransitionCounts.fit(
        items, ITEMS, sigma, offsets=offsets, attributes=attributes, ledger=dp.Ledger(), seed=seed
    )


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_tiny_log_is_no_worse_than_public_attributes_alone(epsilon: float) -> None:
    judged = dataset(1500, 0.7, 99)
    public = accuracy(TransitionCounts.from_public(brands()), judged)
    found = [accuracy(fitted(dataset(300, 0.7, seed), epsilon, brands(), seed), judged) for seed in range(6)]
    assert public > 0.1, "a tenth of that is what popularity gives"
    assert np.mean(found) > public
    assert min(found) > 0.95 * public


@pytest.mark.parametrize("epsilon", [1.0, 5.0])
def test_useless_attributes_cost_next_to_nothing(epsilon: float) -> None:
    """Brands dealt to other items: counts have at most 3% of the budget less, and their accuracy is that of chance."""
    judged, random = dataset(1500, 0.7, 99), np.random.default_rng(0)
    alone, useless = [], []
    for seed in range(5):
        log, dealt = dataset(3000, 0.7, seed), brands().of_rows(random.permutation(ITEMS))
        alone.append(accuracy(fitted(log, epsilon, None, seed), judged))
        model = fitted(log, epsilon, dealt, seed)
        assert not model.num_attributes or float(model.backoff) < 0.15
        useless.append(accuracy(model, judged))
    difference = np.array(useless) - np.array(alone)
    assert difference.mean() > -0.01 * np.mean(alone) - 2 * difference.std() / 2


def test_attributes_that_say_much_gain() -> None:
    judged, log = dataset(1500, 0.7, 99), dataset(3000, 0.7, 0)
    assert accuracy(fitted(log, 1.0, brands(), 0), judged) > 1.3 * accuracy(fitted(log, 1.0, None, 0), judged)


def released(users: int, sigma: float, loyal: float) -> TransitionRelease:
    items, offsets = dataset(users, loyal, 0).packed_train()
    return release_transitions(items, offsets, ITEMS, sigma, seed=0)


def test_real_counts_are_confirmed_and_noise_is_not() -> None:
    assert confirmation(released(20000, 1.0, 0.9)) == 1
    random = np.random.default_rng(0)
    items = np.repeat(random.permutation(ITEMS)[:100], 60)  # users of one item each: there are no pairs
    alone = release_transitions(items, np.arange(len(items) + 1), ITEMS, 1.0, seed=0)
    assert len(alone.pairs) and confirmation(alone) < 0.3
