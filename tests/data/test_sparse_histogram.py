"""The private vocabulary: each clause of its guarantee, checked against formula, sampling and worst cases."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpformer.data import Interactions, PrivateVocabulary, data_statement, prepare, sparse_histogram
from dpformer.errors import DpformerError
from dpformer.releases.vocabulary import exact_counts, last_distinct, spent_delta, threshold_for


def zeros(count: int) -> np.ndarray:
    return np.zeros(count)


@pytest.mark.parametrize(("sigma", "k", "delta"), [(0.5, 1, 1e-3), (1.0, 10, 1e-6), (3.5, 50, 1e-5), (8.0, 200, 1e-8)])
def test_threshold_spends_the_delta_and_no_more(sigma: float, k: int, delta: float) -> None:
    tau = threshold_for(delta, sigma, k)
    sizes = np.arange(1, k + 1)
    exact = max(-np.expm1(sizes * norm.logcdf((tau - 1 / np.sqrt(sizes)) / sigma)))
    assert spent_delta(tau, sigma, k) == pytest.approx(exact, rel=1e-9, abs=0)
    assert 0.999 * delta < exact <= delta


def test_worst_number_of_items_lies_inside() -> None:
    """Neither one item nor the most items is always the worst: the maximum has to be taken over all of them."""
    tau, sigma = 1.05, 0.15
    by_size = [1 - norm.cdf((tau - 1 / math.sqrt(n)) / sigma) ** n for n in range(1, 51)]
    assert int(np.argmax(by_size)) == 0 and by_size[0] > 10 * by_size[-1]
    assert spent_delta(tau, sigma, 50) == pytest.approx(by_size[0])
    tau, sigma = 8.0, 2.0
    by_size = [1 - norm.cdf((tau - 1 / math.sqrt(n)) / sigma) ** n for n in range(1, 51)]
    assert int(np.argmax(by_size)) == 49
    assert spent_delta(tau, sigma, 50) == pytest.approx(by_size[-1])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=15), min_size=1, max_size=6), st.integers(1, 8), st.data())
def test_one_user_moves_the_counts_by_at_most_one(histories: list, k: int, data: st.DataObject) -> None:
    """Sensitivity, on whatever data: L2 distance of the noiseless counts with and without any one user."""

    def counts(those: list[list[int]]) -> np.ndarray:
        users = np.repeat(np.arange(len(those)), [len(history) for history in those])
        items = np.array([item for history in those for item in history], dtype=np.int64)
        full = np.zeros(10)
        found = exact_counts(users, items, k)
        full[: len(found)] = found
        return full

    out = data.draw(st.integers(0, len(histories) - 1))
    others = [history if user != out else [] for user, history in enumerate(histories)]
    distance = np.linalg.norm(counts(histories) - counts(others))
    assert distance <= 1 + 1e-9
    if histories[out]:
        assert distance == pytest.approx(1), "the whole contribution is used"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=15), max_size=6), st.integers(1, 8))
def test_last_distinct_against_a_naive_twin(histories: list, k: int) -> None:
    users = np.repeat(np.arange(len(histories)), [len(history) for history in histories])
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    rows = last_distinct(users, items, k)
    for user, history in enumerate(histories):
        kept: list[int] = []
        for item in reversed(history):
            if item not in kept and len(kept) < k:
                kept.insert(0, item)
        assert items[rows[users[rows] == user]].tolist() == kept


@pytest.mark.parametrize(("own", "sigma"), [(1, 0.4), (4, 0.4), (12, 1.0)])
def test_items_of_one_user_alone_pass_as_rarely_as_accounted(own: int, sigma: float) -> None:
    """Sampling of the whole mechanism: data with one user more than its neighbour, who has items nobody else has."""
    delta, k, runs = 0.05, 4, 4000
    rng = np.random.default_rng(own)
    users = np.array([0] * 3 + [1] * 3 + [2] * own)
    items = np.array([0, 1, 2, 0, 1, 3, *range(4, 4 + own)])
    release = None
    given_away = 0
    for _ in range(runs):
        release = sparse_histogram(
            users, items, noise_multiplier=sigma, delta=delta, max_items=k, normal=rng.standard_normal
        )
        given_away += bool((release.items >= 4).any())
    assert release is not None
    n = min(own, k)
    expected = 1 - norm.cdf((release.threshold - 1 / math.sqrt(n)) / sigma) ** n
    deviation = math.sqrt(expected * (1 - expected) / runs)
    assert abs(given_away / runs - expected) < 4 * deviation
    assert given_away / runs < release.delta + 4 * deviation


def test_the_accounted_pair_dominates_the_mechanism() -> None:
    """Hockey-stick divergences of the exact two-world mechanism never exceed those of Gaussian × (0, δ).

    One item of the user is shared with another user, the others are the user's own. What is seen: the noisy count of
    the shared item, in fine bins, or nothing if it is below the threshold; and whether an own item is there.
    """
    sigma, k, delta = 0.8, 3, 0.01
    tau = threshold_for(delta, sigma, k)
    edges = np.concatenate([[-np.inf], np.linspace(tau, tau + 10, 4001), [np.inf]])
    for n in (1, 2, 3):
        weight = 1 / math.sqrt(n)
        without = np.diff(norm.cdf((edges - 1) / sigma))  # the other user has this item alone: count 1
        with_user = np.diff(norm.cdf((edges - 1 - weight) / sigma))
        p = 1 - norm.cdf((tau - weight) / sigma) ** (n - 1)  # some own item is seen
        for epsilon in (0.0, 0.5, 1.0, 2.0, 4.0):
            alpha = math.exp(epsilon)
            added = p + np.maximum((1 - p) * with_user - alpha * without, 0).sum()
            removed = np.maximum(without - alpha * (1 - p) * with_user, 0).sum()
            gaussian = norm.cdf(1 / (2 * sigma) - epsilon * sigma) - alpha * norm.cdf(
                -1 / (2 * sigma) - epsilon * sigma
            )
            assert max(added, removed) <= delta + (1 - delta) * gaussian + 1e-12


def log(histories: list[list[int]]) -> Interactions:
    users = np.repeat(np.arange(len(histories), dtype=np.int32), [len(history) for history in histories])
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    return Interactions(users, items, [f"u{u}" for u in range(len(histories))], [str(i) for i in range(100)])


def test_common_items_are_kept_rare_ones_dropped_and_the_price_is_stated() -> None:
    histories = [[1, 0, 10 + user] for user in range(80)] + [[0, 1, 2]]
    wanted = PrivateVocabulary(noise_multiplier=2.0, delta=1e-4, max_items=5)
    dataset = prepare(log(histories), vocabulary=wanted, normal=zeros)
    assert list(dataset.vocabulary.ids) == ["0", "1"] and dataset.vocabulary.policy == "dp"
    assert dataset.num_interactions == 2 * 81
    facts = dataset.description["vocabulary"]
    assert facts["interactions_dropped"] == 81 and facts["last_items_dropped"] == 81
    price = facts["release"]
    assert price["noise_multiplier"] == 2.0 and 0 < price["delta"] <= 1e-4 and price["max_items"] == 5
    assert "released from the data with differential privacy" in " ".join(data_statement(dataset.description))


def test_a_release_is_never_kept(tmp_path) -> None:
    """One with the noise of a test, or of another run, must not be found again as this run's."""
    path = tmp_path / "log.txt"
    path.write_text("\n".join(f"{user} {item}" for user in range(80) for item in (1, 2)))
    wanted = PrivateVocabulary(noise_multiplier=2.0, delta=1e-4)
    prepare(path, vocabulary=wanted, normal=zeros, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_noise_is_secret_by_default() -> None:
    histories = [[item for item in range(40) if (user + item) % 2] for user in range(400)]
    wanted = PrivateVocabulary(noise_multiplier=20.0, delta=0.4, max_items=40)
    released = {tuple(prepare(log(histories), vocabulary=wanted).vocabulary.ids) for _ in range(5)}
    assert len(released) > 1


def test_nothing_common_enough_is_said() -> None:
    with pytest.raises(DpformerError, match="no item is common enough"):
        prepare(log([[1, 2], [3, 4]]), vocabulary=PrivateVocabulary(2.0, 1e-4), normal=zeros)


@pytest.mark.parametrize("wanted", [(0.0, 1e-4, 5), (1.0, 0.0, 5), (1.0, 1.0, 5), (math.nan, 1e-4, 5), (1.0, 1e-4, 0)])
def test_bad_parameters_are_refused(wanted: tuple) -> None:
    with pytest.raises(DpformerError, match="must"):
        prepare(log([[1, 2], [3, 4]]), vocabulary=PrivateVocabulary(*wanted), normal=zeros)
