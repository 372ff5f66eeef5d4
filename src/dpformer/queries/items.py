"""The item list and its popularity, released from the data if no public catalogue lists the items.

Noise on every item of a *known* list is the plain Gaussian mechanism (frequencies.py). Here the list itself comes from
the data: only items that occur can receive noise, and reporting an item at all reveals that someone has it. The remedy
(Korolova et al. 2009; Karwa and Vadhan 2018; Wilkins et al. 2024, "Exact privacy analysis of the Gaussian sparse
histogram mechanism") is to report an item only if its noisy count exceeds a threshold that items of a single user
almost never exceed.

**Mechanism.** User u keeps the last n_u ≤ k distinct items and adds 1/√n_u to the count of each (L2 norm 1). Every item
with a positive count gets noise σ·N(0, 1); items with a noisy count above τ are released, with their noisy counts.

**Guarantee** (adding or removing one user's history). Let D' be D with that user's n items, A the items that
occur in D, U the user's items outside A. On A the two outputs are post-processed Gaussian mechanisms whose means differ
by √((n − |U|)/n) ≤ 1 in L2. On U the output is "nothing" under D, and under D' "nothing" except with probability

    p = 1 − Φ((τ − 1/√n)/σ)^|U|  ≤  δ_τ = max_{1≤n≤k} 1 − Φ((τ − 1/√n)/σ)^n,

the worst case over the number of the user's items, and how many of them are new. The noise on A and on U is
independent, so the total δ(ε) is at most (1 − δ_τ)·δ_Gauss(ε) + δ_τ, in both directions: the event is **one Gaussian
with noise multiplier σ, and δ_τ on top** (`Gaussian.delta`); docs/privacy/items.md has the full proof. Without the
cap k no finite τ would suffice, since δ_τ grows with n, but slowly: k = 2²⁰ instead of 50 raises τ by a third.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpformer.accounting.arguments import delta_of, positive, whole
from dpformer.accounting.events import Gaussian
from dpformer.engines.sums import LONGEST
from dpformer.noise.randomness import SecureRandom, public_grid

LABEL = "items"
MOST_ITEMS = LONGEST  # k
EXACT = 1024  # numbers of items for which δ is computed one by one
LONELY, LONELY_ITEMS = 1000, 16  # audit users with unique items, and the number of items of half of them


@dataclass(frozen=True)
class ItemRelease:
    """A released item list, and its price."""

    items: np.ndarray  # (released,) int64, ascending
    counts: np.ndarray  # (released,) float64: noisy Σ_u 1/√n_u, all above the threshold
    threshold: float  # τ
    event: Gaussian  # for the ledger; its delta is δ_τ


def release_items(
    items: np.ndarray,
    offsets: np.ndarray,
    noise_multiplier: float,
    *,
    delta: float,
    random: SecureRandom,
    max_items: int = MOST_ITEMS,
) -> ItemRelease:
    """Release the items that many users have, with their noisy counts.

    Args:
        items: (n,) integers, user u's at items[offsets[u]:offsets[u + 1]], in order of time. Which numbers occur is
            itself private.
        offsets: (users + 1,).
        noise_multiplier: σ, the standard deviation of the noise in units of one user's L2 contribution.
        delta: δ spent on the threshold; subtracted from the total δ.
        random: random numbers for this release only, since they determine the noise.
        max_items: k, the maximum number of distinct items per user.
    """
    counts = exact_popularity(items, offsets, max_items)
    return release_item_sums(counts, noise_multiplier, delta=delta, random=random, max_items=max_items)


def release_item_sums(
    counts: np.ndarray, noise_multiplier: float, *, delta: float, random: SecureRandom, max_items: int = MOST_ITEMS
) -> ItemRelease:
    """The same for precomputed exact sums (items,), of at most `max_items` distinct items per user."""
    threshold = threshold_for(delta, noise_multiplier, max_items)
    occurring = np.flatnonzero(counts)
    noisy = counts[occurring] + noise_multiplier * random.normal(len(occurring), step=0)
    step = public_grid(noise_multiplier)  # the last bits of a float would reveal what was added
    noisy = np.round(noisy / step) * step
    released = noisy > threshold + step  # so that rounding lifts no count over the threshold
    event = Gaussian(noise_multiplier, label=LABEL, delta=delta, private=random.private)
    return ItemRelease(occurring[released], noisy[released], threshold, event)


def spent_delta(threshold: float, noise_multiplier: float, max_items: int = MOST_ITEMS) -> float:
    """δ_τ: the probability that items of a single user exceed the threshold, for the worst number of items ≤ k."""
    from scipy.special import ndtr

    first, last = _blocks(max_items)
    tail = ndtr((1 / np.sqrt(first) - threshold) / noise_multiplier)  # 1 − Φ(x) = Φ(−x), accurate in the tail
    with np.errstate(divide="ignore"):  # a threshold far below is always exceeded
        return float(np.max(-np.expm1(last * np.log1p(-tail))))


def _blocks(max_items: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last n of blocks of 1 … k: using 1/√first and the power `last` bounds every n inside.

    Single numbers up to `EXACT`, then blocks a thousandth wide: δ_τ is overestimated by at most that.
    """
    if max_items <= EXACT:
        n = np.arange(1, max_items + 1)
        return n, n
    starts = np.unique(np.geomspace(EXACT, max_items, math.ceil(1000 * math.log(max_items / EXACT)) + 2).astype(int))
    first = np.concatenate([np.arange(1, EXACT), starts])
    return first, np.append(first[1:] - 1, max_items)


def threshold_for(delta: float, noise_multiplier: float, max_items: int = MOST_ITEMS) -> float:
    """The smallest τ with δ_τ ≤ delta, rounded up."""
    delta, noise_multiplier = delta_of(delta), positive("noise_multiplier", noise_multiplier)
    max_items = whole("max_items", max_items, 1)
    low, high = 0.0, 1.0 + 40.0 * noise_multiplier  # Φ(−40) underflows, so no δ is smaller
    while high - low > 1e-6 * noise_multiplier:
        middle = (low + high) / 2
        low, high = (low, middle) if spent_delta(middle, noise_multiplier, max_items) <= delta else (middle, high)
    return high


def last_distinct(users: np.ndarray, items: np.ndarray, max_items: int) -> np.ndarray:
    """Rows (ascending) with each user's last `max_items` distinct items. `users` must be sorted.

    Which items a user keeps depends on that user's rows alone, so the cap costs no privacy.
    """
    backwards = np.arange(len(users))[::-1]
    pairs = users[backwards].astype(np.int64) * (int(items.max(initial=0)) + 1) + items[backwards]
    rows = np.sort(backwards[np.unique(pairs, return_index=True)[1]])  # the last row of each (user, item)
    kept = users[rows]
    stops = np.searchsorted(kept, kept, side="right")
    return rows[stops - np.arange(len(rows)) <= max_items]


def exact_popularity(items: np.ndarray, offsets: np.ndarray, max_items: int = MOST_ITEMS) -> np.ndarray:
    """Σ_u 1/√n_u over the users who keep an item, for item 0, 1, …: without noise, do not release it."""
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    rows = last_distinct(users, items, max_items)
    lengths = np.bincount(users[rows], minlength=1)  # n_u
    weights = 1 / (np.sqrt(lengths[users[rows]]) * (1 + 1e-12))  # a norm of at most 1, not of 1 + 10⁻¹⁶
    return np.bincount(items[rows], weights=weights, minlength=1)


def passed_noise(counts: np.ndarray, exact: np.ndarray, noise_multiplier: float, threshold: float) -> np.ndarray:
    """The noise of released counts as standard normal numbers, given that they exceeded the threshold: for `verify`.

    c − x is normal given c > τ, so u = Q((c − x)/σ) / Q((τ − x)/σ) is uniform and Φ⁻¹(1 − u) standard normal.
    """
    from scipy.special import log_ndtr, ndtri_exp

    above = log_ndtr(-(counts - exact) / noise_multiplier) - log_ndtr(-(threshold - exact) / noise_multiplier)
    return np.asarray(-ndtri_exp(np.minimum(above, -math.ulp(1.0))))


def lonely(first: int) -> list[np.ndarray]:
    """Histories of users with unique items, numbered from `first`: one item each, then `LONELY_ITEMS`."""
    one = np.arange(first, first + LONELY)
    many = np.arange(first + LONELY, first + LONELY + LONELY * LONELY_ITEMS).reshape(LONELY, LONELY_ITEMS)
    return [*one[:, None], *many]


def alone_of(released: np.ndarray, first: int, delta: float) -> tuple[int, int, float]:
    """How many of the users with unique items have one released, their number, and δ of the threshold."""
    places = released[released >= first] - first
    users = np.where(places < LONELY, places, LONELY + (places - LONELY) // LONELY_ITEMS)
    return len(np.unique(users)), 2 * LONELY, delta
