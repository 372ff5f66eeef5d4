"""Evidence for attributes: the public set of near pairs, one user's part in the sums, their noise, and the decision."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from dpformer.data.attributes import Attributes
from dpformer.data.near_pairs import chance_of, near_pairs
from dpformer.engines.sums import GRID, WEIGHTS, ArraySums
from dpformer.noise.randomness import SecureRandom
from dpformer.queries.transitions.attribute_evidence import (
    LEAST,
    MOST,
    AttributeEvidence,
    evidence_share,
    exact_evidence,
    release_evidence,
)

ITEMS = 40


def attributes(seed: int = 0) -> Attributes:
    """Brands of a few items, a category of half of them, and a flag of nearly all."""
    random = np.random.default_rng(seed)
    rows = [
        [("brand", str(random.integers(12))), ("half", str(item % 2)), ("all", str(item == 0))] for item in range(ITEMS)
    ]
    return Attributes.of_items(rows)


def packed(histories: list[np.ndarray]) -> ArraySums:
    return ArraySums.packed(np.concatenate(histories), np.cumsum([0, *map(len, histories)]))


def test_near_pairs_share_an_attribute_of_a_column_from_the_rarest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A naive twin: groups of each column by size, until their pairs are more than allowed."""
    monkeypatch.setattr("dpformer.data.near_pairs.PER_ITEM", 8)
    known = attributes().with_pairs()
    has = {g: known.origins[known.links == g].tolist() for g in range(len(known))}
    expected: set[int] = set()
    for column in {name for name, _ in known.names}:
        groups = sorted((g for g in has if known.names[g][0] == column), key=lambda g: len(has[g]))
        used = 0
        for g in groups:
            used += math.comb(len(has[g]), 2)
            if used > 8 * ITEMS:
                break
            expected |= {b * (b - 1) // 2 + a for a, b in combinations(has[g], 2)}
    assert near_pairs(attributes()).tolist() == sorted(expected)
    assert chance_of(near_pairs(attributes()), ITEMS) == len(expected) / math.comb(ITEMS, 2)


def test_the_sums_of_a_user_are_those_of_the_definition() -> None:
    near, history = near_pairs(attributes()), np.array([3, 5, 3, 9, 9, 30, 12])
    weights = np.zeros(2)
    for first, second in combinations(range(len(history)), 2):
        a, b = sorted((history[first], history[second]))
        if a != b and second - first <= len(WEIGHTS):
            weights[int(b * (b - 1) // 2 + a not in near)] += WEIGHTS[second - first - 1]
    found = packed([history]).shared(near, ITEMS) / GRID
    np.testing.assert_allclose(found, weights / np.linalg.norm(weights), atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_one_user_more_changes_the_sums_by_a_norm_of_one_at_most(seed: int) -> None:
    """Random neighbouring logs, with users who repeat, jump about, or have one item."""
    random, near = np.random.default_rng(seed), near_pairs(attributes(seed))
    users = [random.integers(0, ITEMS, random.integers(1, 30)) for _ in range(20)]
    more = [np.tile(random.integers(0, ITEMS, 2), 500), random.integers(0, ITEMS, random.integers(1, 200))][seed % 2]
    place = int(random.integers(len(users)))
    difference = packed([*users[:place], more, *users[place:]]).shared(near, ITEMS) - packed(users).shared(near, ITEMS)
    assert np.linalg.norm(difference.astype(np.float64)) <= GRID


def test_the_noise_is_that_of_its_deviation() -> None:
    sums, near, deviation = packed([np.arange(9)] * 50), near_pairs(attributes()), 3.0
    exact = exact_evidence(sums, near, ITEMS)
    assert exact.deviation == 0 and exact.excess[1] == 0
    draws = [release_evidence(sums, near, ITEMS, deviation, SecureRandom("test", seed=seed)) for seed in range(400)]
    noise = np.array([draw.sums - exact.sums for draw in draws]) / deviation
    squares = float(np.square(noise).sum())
    assert 1e-6 < stats.chi2.cdf(squares, noise.size) < 1 - 1e-6
    assert abs(np.corrcoef(noise.T)[0, 1]) < 0.25
    spread = np.std([draw.excess[0] for draw in draws])
    assert spread == pytest.approx(np.mean([draw.excess[1] for draw in draws]), rel=0.2)


@pytest.mark.parametrize(("users", "sigma"), [(10, 5.0), (500, 4.0), (1000, 3.0), (10**6, 0.5)])
def test_the_share_is_small_and_smaller_for_many_users(users: int, sigma: float) -> None:
    share = evidence_share(users, sigma)
    assert LEAST <= share <= MOST
    if LEAST < share < MOST:
        assert sigma / math.sqrt(share) / users == pytest.approx(0.01)


def test_strength_follows_the_excess_and_without_knowledge_the_prior() -> None:
    def strength(excess: float, deviation: float) -> float:
        return AttributeEvidence(np.array([1000 * (0.1 + excess), 1000 * (0.9 - excess)]), 0.1, deviation).strength

    assert strength(0.0, 0.0) == 0 and strength(0.01, 0.0) == 0 and strength(0.061, 0.0) == 1
    assert strength(0.035, 0.0) == pytest.approx(0.5)
    assert strength(0.0, 1e6) == 1, "noise says nothing, so attributes are taken as those of most catalogues"
    assert strength(0.0, 10.0) < 0.1, "1,000 users at this noise say enough"
    assert AttributeEvidence(np.array([-3.0, 2.0]), 0.1, 5.0).strength == 1, "there is nothing but noise"
