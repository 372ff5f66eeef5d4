"""Rankers that look only where something is: the ranks and lists of the dense twin, ties and all."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.evaluation import rankers, sparse_ranker
from dpformer.evaluation.evaluate import scorer
from dpformer.evaluation.rankers import DenseRanker, Histories, KnownItems, NetworkRanker, Placed, Ranker
from dpformer.evaluation.ranking import NonFiniteScores
from dpformer.evaluation.sparse_ranker import SparseRanker
from dpformer.kinds.ranking import ranker
from dpformer.models import GRU, Transformer
from dpformer.models.counts import TransitionCounts
from dpformer.models.evidence import Evidence

ITEMS = 30


def some(rng: np.random.Generator, users: int, num_items: int = ITEMS) -> tuple[Histories, np.ndarray]:
    lengths = rng.integers(0, 40, users)
    items = rng.integers(0, num_items, int(lengths.sum()))
    return Histories(items, np.concatenate([[0], np.cumsum(lengths)])), rng.integers(0, num_items, users)


def counts(rng: np.random.Generator, density: float = 0.2) -> TransitionCounts:
    """A model with many ties: chances and popularity take few values."""
    table = np.where(rng.random((ITEMS, ITEMS)) < density, rng.choice([0.25, 0.5, 1.0], (ITEMS, ITEMS)), 0)
    rows, targets = np.nonzero(table)
    model = TransitionCounts(ITEMS, len(rows))
    model.offsets.copy_(torch.from_numpy(np.searchsorted(rows, np.arange(ITEMS + 1))))
    model.targets.copy_(torch.from_numpy(targets))
    model.chances.copy_(torch.from_numpy(table[rows, targets]))
    model.popularity.copy_(torch.from_numpy(rng.choice([1.0, 2.0, 50.0], ITEMS)))
    return model.eval()


def dense_counts(model: TransitionCounts) -> DenseRanker:
    evidence = Evidence(model)

    def score(histories: list[np.ndarray]) -> torch.Tensor:
        offsets = np.cumsum([0, *map(len, histories)])
        return torch.from_numpy(evidence.of(np.concatenate(histories), offsets))

    return DenseRanker(score, ITEMS)


def by_hand(scores: np.ndarray, history: np.ndarray, target: int, k: int, allow_seen: bool) -> tuple[int, int, list]:
    seen = set(history.tolist())
    ahead = [item for item in range(len(scores)) if scores[item] >= scores[target]]
    order = sorted(range(len(scores)), key=lambda item: (-scores[item], item))
    first = [item for item in order if allow_seen or item not in seen][:k]
    masked = [item for item in ahead if item == target or item not in seen]
    return len(ahead), len(masked), first + [-1] * (k - len(first))


def same(found: Placed, expected: Placed) -> None:
    np.testing.assert_array_equal(found.unmasked, expected.unmasked)
    np.testing.assert_array_equal(found.masked, expected.masked)
    np.testing.assert_array_equal(found.first, expected.first)


@pytest.mark.parametrize("few", [0.0, 1.0], ids=["all items are compared", "through what is not zero"])
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), k=st.sampled_from([0, 1, 5, 40]), allow_seen=st.booleans())
def test_counts_and_popularity_are_placed_as_by_the_dense_twin(
    few: float, monkeypatch: pytest.MonkeyPatch, seed: int, k: int, allow_seen: bool
) -> None:
    rng = np.random.default_rng(seed)
    model = counts(rng, density=float(rng.choice([0.0, 0.1, 0.9])))
    monkeypatch.setattr(sparse_ranker, "FEW", few)
    monkeypatch.setattr(rankers, "GROUP", int(rng.choice([2, 4, 64])))
    histories, targets = some(rng, 9)
    same(
        ranker(model).place(histories, targets, k, allow_seen=allow_seen),
        dense_counts(model).place(histories, targets, k, allow_seen=allow_seen),
    )
    p = rng.integers(0, 4, ITEMS).astype(float)
    twin = DenseRanker(lambda rows: torch.from_numpy(p).expand(len(rows), -1), ITEMS)
    same(
        SparseRanker(p).place(histories, targets, k, allow_seen=allow_seen),
        twin.place(histories, targets, k, allow_seen=allow_seen),
    )


@pytest.mark.parametrize("allow_seen", [False, True])
def test_the_dense_twin_is_what_is_counted_by_hand(allow_seen: bool) -> None:
    rng = np.random.default_rng(0)
    model = counts(rng)
    histories, targets = some(rng, 12)
    found = ranker(model).place(histories, targets, 4, allow_seen=allow_seen)
    scores = Evidence(model).of(histories.items, histories.offsets)
    for user, history in enumerate(histories.split()):
        unmasked, masked, first = by_hand(scores[user], history, int(targets[user]), 4, allow_seen)
        assert (found.unmasked[user], found.masked[user]) == (unmasked, masked)
        assert found.first[user].tolist() == first


def test_ranks_of_counts_are_those_of_the_models_scores_in_float64() -> None:
    """Where no two scores are closer than rounding."""
    rng = np.random.default_rng(1)
    model = counts(rng)
    model.chances.copy_(torch.from_numpy(rng.random(len(model.chances))))
    model.popularity.copy_(torch.from_numpy(rng.random(ITEMS)))
    histories, targets = some(rng, 200)
    twin = DenseRanker(lambda rows: model.double().scores(rows), ITEMS)
    expected = twin.place(histories, targets, 3)
    same(ranker(model.float()).place(histories, targets, 3), expected)


@pytest.mark.parametrize("kind", [Transformer, GRU])
def test_networks_are_placed_as_by_the_dense_twin(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankers, "SCORES_AT_ONCE", 4 * ITEMS)  # four users at a time
    monkeypatch.setattr(rankers, "TOKENS_AT_ONCE", 50)
    torch.manual_seed(0)
    model = kind(ITEMS, 10, dim=8).eval()
    rng = np.random.default_rng(2)
    histories, targets = some(rng, 25)
    quick, twin = NetworkRanker(model), DenseRanker(scorer(model), ITEMS)
    for allow_seen in (False, True):
        expected = twin.place(histories, targets, 5, allow_seen=allow_seen)
        same(quick.place(histories, targets, 5, allow_seen=allow_seen), expected)
    with torch.no_grad():
        model.items.weight[3, 0] = float("nan")
    with pytest.raises(NonFiniteScores):
        NetworkRanker(model).place(histories, targets)


def test_items_that_a_model_lacks_stand_after_all_others() -> None:
    rng = np.random.default_rng(3)
    model, size = counts(rng), ITEMS + 12
    numbers = np.full(size, -1)
    numbers[rng.permutation(size)[:ITEMS]] = rng.permutation(ITEMS)
    inner = Evidence(model)

    def score(histories: list[np.ndarray]) -> torch.Tensor:
        rows = []
        for history in histories:
            mapped = numbers[history]
            mapped = mapped[mapped >= 0]
            found = inner.of(mapped, np.array([0, len(mapped)]))[0]
            rows.append(np.where(numbers >= 0, found[numbers], found.min() - 1))
        return torch.from_numpy(np.array(rows))

    histories, targets = some(rng, 60, size)
    quick: Ranker = KnownItems(ranker(model), numbers)
    same(quick.place(histories, targets), DenseRanker(score, size).place(histories, targets))
    first = quick.place(histories, targets, 7).first
    assert (numbers[first[first >= 0]] >= 0).all()  # what it lacks is never recommended


def test_nobody_is_placed_nowhere_and_bad_numbers_are_refused() -> None:
    rng = np.random.default_rng(4)
    nobody = Histories(np.zeros(0, np.int64), np.zeros(1, np.int64))
    assert ranker(counts(rng)).place(nobody, np.zeros(0, np.int64), 3).first.shape == (0, 3)
    model = counts(rng)
    model.chances[0] = float("nan")
    everyone = Histories(np.tile(np.arange(9), 2), np.array([0, 9, 18]))
    with pytest.raises(NonFiniteScores):
        ranker(model).place(everyone, np.array([0, 1]))
    with pytest.raises(NonFiniteScores):
        SparseRanker(np.array([1.0, np.inf]))


@pytest.mark.parametrize("kind", [Transformer, GRU])
def test_nobody_changes_the_scores_of_others(kind: type[Transformer | GRU]) -> None:
    """Bit for bit: a score that moved by a rounding could turn a rank, and a noisy metric allows for one user only."""
    torch.manual_seed(0)
    model = kind(300, 100, dim=32).eval()
    rng = np.random.default_rng(1)
    histories = [rng.integers(0, 300, length) for length in [1, 1, 2, 3, 3, 7, 20, 38, 38, 38, 39, 60]]

    def scores(some: list[np.ndarray]) -> np.ndarray:
        ranker = NetworkRanker(model)
        return ranker._scores(ranker._states(some)).copy()

    alone = np.concatenate([scores([history]) for history in histories])
    np.testing.assert_array_equal(scores(histories), alone)
    np.testing.assert_array_equal(scores([*histories, rng.integers(0, 300, 100)])[:-1], alone)
    direct = model.scores(histories).detach().numpy()
    np.testing.assert_allclose(alone, direct, rtol=0, atol=1e-5)
