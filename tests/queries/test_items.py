"""The released list of items: each clause of its guarantee, checked against formula, sampling and worst cases."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpformer.noise import SecureRandom
from dpformer.queries.items import (
    MOST_ITEMS,
    exact_popularity,
    last_distinct,
    passed_noise,
    release_items,
    spent_delta,
    threshold_for,
)
from dpformer.queries.transitions.rounds import release_transitions


def packed(histories: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    return items, np.cumsum([0, *map(len, histories)])


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


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 9), max_size=15), min_size=1, max_size=6), st.integers(1, 8), st.data())
def test_one_user_moves_the_counts_by_at_most_one(histories: list, k: int, data: st.DataObject) -> None:
    """Sensitivity, on whatever data: L2 distance of the noiseless counts with and without any one user."""

    def counts(those: list[list[int]]) -> np.ndarray:
        full = np.zeros(10)
        found = exact_popularity(*packed(those), k)
        full[: len(found)] = found
        return full

    out = data.draw(st.integers(0, len(histories) - 1))
    others = [history if user != out else [] for user, history in enumerate(histories)]
    distance = np.linalg.norm(counts(histories) - counts(others))
    assert distance <= 1 + 1e-9
    if histories[out]:
        assert distance == pytest.approx(1), "the whole contribution is used"


@settings(max_examples=100)
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
    """Sampling of the whole mechanism: a user, whose history is nothing in the neighbour, has items nobody else has."""
    delta, k, runs = 0.05, 4, 2000
    items, offsets = packed([[0, 1, 2], [0, 1, 3], [*range(4, 4 + own)]])
    seen, release = 0, None
    for seed in range(runs):
        release = release_items(items, offsets, sigma, delta=delta, random=SecureRandom(seed=seed), max_items=k)
        seen += bool((release.items >= 4).any())
    assert release is not None
    n = min(own, k)
    expected = 1 - norm.cdf((release.threshold - 1 / math.sqrt(n)) / sigma) ** n
    deviation = math.sqrt(expected * (1 - expected) / runs)
    assert expected * 0.8 - 4 * deviation < seen / runs < expected + 4 * deviation, "rounding only takes away"
    assert seen / runs < release.event.delta + 4 * deviation


def test_the_worst_user_is_given_away_as_rarely_as_stated() -> None:
    """As many new items as are counted of one user, and the number of new items for which δ is tight."""
    sigma, delta, runs, k = 2.0, 0.02, 1500, 200
    tau = threshold_for(delta, sigma, k)
    worst = max(range(1, k + 1), key=lambda n: 1 - norm.cdf((tau - 1 / math.sqrt(n)) / sigma) ** n)
    for own in (worst, 3 * k):
        items, offsets = packed([[0, 1], [*range(2, 2 + own)]])
        seen = 0
        for seed in range(runs):
            random = SecureRandom("worst case", seed=seed)
            seen += bool(
                (release_items(items, offsets, sigma, delta=delta, random=random, max_items=k).items >= 2).any()
            )
        assert seen / runs < delta + 4 * math.sqrt(delta / runs)
        assert seen / runs > delta / 3, "the threshold is no higher than it has to be"


def test_counts_release_no_item_of_one_user_alone() -> None:
    """All rounds of transition counts: an item that one user brings, in as many pairs as there can be, is not in it."""
    histories = [[user % 5, (user + 1) % 5, (user + 2) % 5] for user in range(400)] + [[9, 0, 9, 1, 9, 2, 9, 3] * 20]
    items, offsets = packed(histories)
    for seed in range(40):
        release = release_transitions(items, offsets, 10, 0.7, delta=1e-6, random=SecureRandom(seed=seed))
        assert release.item_list is not None and release.item_list.tolist() == [0, 1, 2, 3, 4]
        assert len(release.frequencies.p) == 5 and release.pairs.max(initial=0) < 5
        assert release.event.delta == 1e-6 and release.event.failure == 1e-6


def test_the_noise_of_what_passed_is_seen_and_its_absence_too() -> None:
    rng = np.random.default_rng(0)
    exact = rng.uniform(0, 40, 20_000)
    noisy = exact + 3 * rng.standard_normal(len(exact))
    passed = noisy > 15
    z = passed_noise(noisy[passed], exact[passed], 3.0, 15.0)
    assert np.square(z).mean() == pytest.approx(1, abs=0.05) and z.mean() == pytest.approx(0, abs=0.05)
    clear = exact[passed & (exact > 15)]
    assert np.square(passed_noise(clear, clear, 3.0, 15.0)).mean() < 0.3, "no noise at all"


def test_the_cap_costs_little() -> None:
    """k = 2²⁰ instead of 50: a third more of threshold, so nobody has to choose it."""
    assert threshold_for(1e-6, 5.0, MOST_ITEMS) < 1.35 * threshold_for(1e-6, 5.0, 50)


def test_blocks_never_understate() -> None:
    tau, sigma, k = 20.0, 4.0, 30_000
    n = np.arange(1, k + 1)
    exact = float(np.max(-np.expm1(n * norm.logcdf((tau - 1 / np.sqrt(n)) / sigma))))
    assert exact <= spent_delta(tau, sigma, k) <= 1.003 * exact


def test_the_same_key_gives_the_same_list_and_another_key_another() -> None:
    items, offsets = packed([[item for item in range(40) if (user + item) % 2] for user in range(400)])

    def released(key: int) -> tuple[int, ...]:
        random = SecureRandom(seed=key)
        return tuple(release_items(items, offsets, 20.0, delta=0.4, random=random, max_items=20).items.tolist())

    assert released(1) == released(1) and len({released(key) for key in range(5)}) > 1


@pytest.mark.parametrize("wanted", [(0.0, 1e-4, 5), (1.0, 0.0, 5), (1.0, 1.0, 5), (math.nan, 1e-4, 5), (1.0, 1e-4, 0)])
def test_bad_parameters_are_refused(wanted: tuple[float, float, int]) -> None:
    sigma, delta, k = wanted
    with pytest.raises(ValueError, match="must"):
        release_items(*packed([[1, 2]]), sigma, delta=delta, max_items=k, random=SecureRandom(seed=0))


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
