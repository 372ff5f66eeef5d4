r"""Canaries for transition counts: synthetic users run through the actual release.

Most canaries own a pair {a, b} and have the history a, b, b, …: only (a, b) is counted, with a weight that scaling must
reduce to 1. Some own `GROUP` items and have each of them once: all their pairs count, with weights w_d by the distance
d, and scaling must reduce the *norm* to 1, not the largest weight. The observation of such a canary is the sum over its
pairs, each times w_d/‖w‖. So that every pair survives all rounds, other users, known to the attacker, share it. Half of
the canaries, chosen at random, take part. For each canary the release reveals a total and a difference of directions,

    S_j = 1[j takes part] + s_S·N(0, 1),     D_j likewise with s_D,     1/s_S² = P_u + P_d/2,  1/s_D² = P_d/2,

minus the contributions of others, with P_u and P_d the shares of undirected and directed rounds over σ². Their mean,
weighted by precision, has a standard deviation s with 1/s² = P_u + P_d: an attacker sees the whole budget except what
is spent on popularity.

The release is made a second time with attributes that only the items of the first pair share. Enough of the other users
have that pair for the evidence to be strong, so popularity is released twice. In addition the evidence alone is
released once for every canary, whose pairs are near, other, or both, to check its noise.

With a released item list there are also users with unique items, which must not be released.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

from dpformer.accounting.events import Gaussian
from dpformer.engines.sums import WEIGHTS, WINDOW, ArraySums
from dpformer.noise.randomness import SecureRandom
from dpformer.queries.base import Canaries
from dpformer.queries.items import alone_of, lonely, threshold_for
from dpformer.queries.transitions.attribute_evidence import release_evidence
from dpformer.queries.transitions.rounds import (
    ROUNDS,
    TransitionRelease,
    deviation_of_evidence,
    noise_of_pairs,
    release_transitions,
    round_of_items,
)

CLEAR = 8.0  # standard deviations by which a pair, or an item, exceeds its threshold
GROUP = 6  # number of items of a canary with many pairs
MOST_GROUPS = 250
NEAR = np.zeros(1, np.int64)  # near pairs: the first one, {0, 1}
STRONG_SHARE = 0.15  # additional users with that pair, relative to all others


class Cast:
    """The users, apart from the coin flips: canaries with their pairs, and the number of other users on each pair."""

    def __init__(self, canaries: int, event: Gaussian) -> None:
        self.groups = groups_among(canaries)
        self.single = canaries - self.groups
        self.items_of_pairs = items_for(self.single)
        self.num_items = self.items_of_pairs + GROUP * self.groups
        inside = np.array(list(combinations(range(GROUP), 2)))
        first = self.items_of_pairs + GROUP * np.arange(self.groups)
        pairs = np.array([(a, b) for b in range(self.items_of_pairs) for a in range(b)])
        self.pairs = np.concatenate([pairs, (first[:, None, None] + inside).reshape(-1, 2)])
        weights = np.array(WEIGHTS, dtype=np.float64)[inside[:, 1] - inside[:, 0] - 1]
        self.weights = weights / np.linalg.norm(weights)  # weights of a canary with many pairs
        self.known = math.ceil(CLEAR * event.noise_multiplier / math.sqrt(ROUNDS[0].share)) + 10
        if event.failure:
            items = event.noise_multiplier / math.sqrt(round_of_items(listed=True, again=False).share)
            self.known += math.ceil(threshold_for(event.failure, items) + CLEAR * items)

    def histories(self, member: np.ndarray) -> list[np.ndarray]:
        """The histories of the canaries that take part."""
        pairs = self.pairs[: self.single][member[: self.single]]
        loud = np.repeat(pairs[:, 1:], WINDOW + 1, axis=1)
        loud[:, 0] = pairs[:, 0]  # a, b, b, …
        groups = np.arange(self.items_of_pairs, self.num_items).reshape(self.groups, GROUP)
        return [*loud, *groups[member[self.single :]]]

    def popularity(self, member: np.ndarray) -> np.ndarray:
        """(num_items,) all contributions to the round of items, 1/√n to each of n items, computed independently."""
        found = np.bincount(self.pairs.ravel(), minlength=self.num_items) * (self.known / math.sqrt(2))
        taking_part = self.pairs[: self.single][member[: self.single]]
        found += np.bincount(taking_part.ravel(), minlength=self.num_items) / math.sqrt(2)
        found[self.items_of_pairs :] += np.repeat(member[self.single :] / math.sqrt(GROUP), GROUP)
        return found

    def of_canaries(self, of_pairs: np.ndarray) -> np.ndarray:
        """(…, canaries) from numbers for all pairs (…, pairs)."""
        of_groups = of_pairs[..., self.single :].reshape(*of_pairs.shape[:-1], self.groups, -1) @ self.weights
        return np.concatenate([of_pairs[..., : self.single], of_groups], axis=-1)


def groups_among(canaries: int) -> int:
    """How many of them have many pairs: the number of the others must be a number of pairs of some items."""
    return next(
        canaries - pairs
        for items in range(items_for(canaries), 1, -1)
        if canaries - (pairs := items * (items - 1) // 2) >= min(MOST_GROUPS, canaries // 20)
    )


def items_for(canaries: int) -> int:
    """The smallest number of items with as many pairs as there are canaries."""
    return math.ceil((1 + math.sqrt(1 + 8 * canaries)) / 2)


def canary_count(wanted: int) -> int:
    """The number of pairs of some items, plus some canaries with many pairs."""
    items = items_for(wanted)
    return items * (items - 1) // 2 + min(MOST_GROUPS, max(10, wanted // 20))


def canaries(event: Gaussian, member: np.ndarray, seed: int | None) -> Canaries:
    """Two releases, with popularity once and twice; the attacker sees the first, and the noise of both is checked."""
    cast = Cast(len(member), event)
    once = Seen(cast, member, event, described=False, seed=seed)
    twice = Seen(cast, member, event, described=True, seed=seed)
    return Canaries(
        estimate=once.precisions @ once.of_canaries / once.precisions.sum(),
        deviation=float(once.precisions.sum() ** -0.5),
        noise=once.noise(member),
        others={
            "noise: round of items": once.popularity,
            "noise: round of items, released twice": twice.popularity,
            "noise: pairs, if items were released twice": twice.noise(member).ravel(),
            "noise: evidence for attributes": _noise_of_evidence(len(member), event, seed),
        },
        many=np.arange(len(member)) >= cast.single,
        alone=_alone(once.release, cast, event.failure),
    )


class Seen:
    """What one release reveals about all canaries."""

    def __init__(self, cast: Cast, member: np.ndarray, event: Gaussian, *, described: bool, seed: int | None) -> None:
        sigma, listed = event.noise_multiplier, bool(event.failure)
        many = np.full(len(cast.pairs), cast.known)
        many[0] += described * math.ceil(STRONG_SHARE * cast.known * len(cast.pairs))
        others = np.repeat(cast.pairs, many, axis=0)
        own = [*cast.histories(member), *(lonely(cast.num_items) if listed else [])]
        lengths = np.append(np.full(len(others), 2), [len(history) for history in own])
        flat = np.concatenate([others.ravel(), *own])
        self.release = release_transitions(
            flat,
            np.append(0, np.cumsum(lengths)),
            int(flat.max()) + 1,
            sigma,
            delta=event.failure,
            near=NEAR if described else None,
            seed=seed,
        )
        if described and not listed and self.release.again is None:
            raise ArithmeticError("attributes that say much were not recognised: the evidence is wrong")
        if not np.array_equal(self.release.items[: cast.num_items], np.arange(cast.num_items)):
            raise ArithmeticError("an item of many users did not survive: the rounds are wrong")
        first = round_of_items(listed=listed, again=self.release.again is not None)
        evidence_of = None if self.release.evidence is None else len(lengths)
        rest = noise_of_pairs(first, sigma, evidence_of=evidence_of)
        undirected, directed = (sum(r.share for r in ROUNDS if r.directed is way) / rest**2 for way in (False, True))
        self.precisions = np.array([undirected + directed / 2, directed / 2])  # precision of total and difference
        self.of_canaries = cast.of_canaries(_of_pairs(self.release, cast.pairs) - many)
        expected = cast.popularity(member)
        expected[cast.pairs[0]] += (many[0] - cast.known) / math.sqrt(2)
        counts = self.release.frequencies.counts[: cast.num_items]
        self.popularity = (counts - expected) * math.sqrt(first.share) / sigma

    def noise(self, member: np.ndarray) -> np.ndarray:
        """(2, some): noise where no canary takes part."""
        return self.of_canaries[:, ~member] * np.sqrt(self.precisions[:, None])


def _of_pairs(release: TransitionRelease, pairs: np.ndarray) -> np.ndarray:
    """(2, pairs): total and difference of each."""
    low, high = release.pairs.T
    cells, wanted = high * (high - 1) // 2 + low, pairs[:, 1] * (pairs[:, 1] - 1) // 2 + pairs[:, 0]
    found = np.minimum(np.searchsorted(cells, wanted), len(cells) - 1)
    if not np.array_equal(cells[found], wanted):
        raise ArithmeticError("a pair of many users did not survive: the rounds are wrong")
    return np.stack([release.total[found], release.difference[found]])


def _noise_of_evidence(count: int, event: Gaussian, seed: int | None) -> np.ndarray:
    """The noise of `count` releases of evidence, each about one user: with pairs that are near, other, or both."""
    users = [np.array([0, 1]), np.array([0, 2]), np.array([0, 1, 2])]
    due = np.array([[WEIGHTS[0], 0], [0, WEIGHTS[0]], [WEIGHTS[0], WEIGHTS[0] + WEIGHTS[1]]], dtype=np.float64)
    due /= np.linalg.norm(due, axis=1, keepdims=True)
    sums = [ArraySums.packed(user, np.array([0, len(user)])) for user in users]
    deviation, random = deviation_of_evidence(1, event.noise_multiplier), SecureRandom("evidence", seed=seed)
    seen = [release_evidence(sums[j % 3], NEAR, 3, deviation, random.within(str(j))).sums for j in range(count)]
    return np.asarray((np.array(seen) - due[np.arange(count) % 3]) / deviation).ravel()


def _alone(release: TransitionRelease, cast: Cast, delta: float) -> tuple[int, int, float] | None:
    if not delta or release.item_list is None:
        return None
    return alone_of(release.item_list, cast.num_items, delta)
