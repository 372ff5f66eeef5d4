r"""Which items are common: the Gaussian sparse histogram, for a vocabulary whose domain is not known beforehand.

Noise on every item of a *known* list is the plain Gaussian mechanism. Here the list itself comes from the data: only
items that occur can be noised, and that an item is reported at all says that somebody has it. The remedy (Korolova et
al. 2009; Karwa and Vadhan 2018; Wilkins et al. 2024, "Exact privacy analysis of the Gaussian sparse histogram
mechanism") is to report an item only if its noisy count passes a threshold that items of one user alone hardly ever do.

**Mechanism.** User u keeps n_u ≤ k distinct items and adds 1/√n_u to the count of each (L2 norm 1). Every item with a
positive count gets noise σ·N(0, 1); those with a noisy count above τ are released, with their noisy counts.

**Guarantee** (add or remove one user). Let D' = D + user with n items, A the items that occur in D, U the user's items
outside A. On A the two outputs are post-processed Gaussian mechanisms whose means differ by √((n − |U|)/n) ≤ 1 in L2.
On U the output is "nothing" under D, and under D' "nothing" except with probability

    p = 1 − Φ((τ − 1/√n)/σ)^|U|  ≤  δ_τ = max_{1≤n≤k} 1 − Φ((τ − 1/√n)/σ)^n.

The noise on A and on U is independent, so the pair (M(D), M(D')) is the product of a Gaussian pair of sensitivity at
most 1 and a pair that is dominated by the (0, δ_τ)-DP pair: the hockey-stick divergence of "nothing" from it, and of it
from "nothing", at order α is at most δ_τ + (1 − δ_τ)·max(0, 1 − α). Dominating pairs compose (Zhu, Dong, Wang 2022), so
the ledger records **one Gaussian event with noise multiplier σ, and δ_τ added to the total δ**:
δ_total(ε) ≤ δ_rest(ε) + δ_τ with the Gaussian in the rest. Without the cap k no finite τ would do: δ_τ grows with n.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpformer.privacy.randomness import public_grid


@dataclass(frozen=True)
class SparseHistogram:
    """What is released, and its price: a Gaussian event of `noise_multiplier`, and `delta` on top."""

    items: np.ndarray  # (released,) int64, ascending
    counts: np.ndarray  # (released,) float64: noisy Σ_u 1/√n_u, all above the threshold
    noise_multiplier: float
    threshold: float
    delta: float
    max_items: int


def spent_delta(threshold: float, noise_multiplier: float, max_items: int) -> float:
    """δ_τ: the probability that items of one user alone pass the threshold, for the worst number of items ≤ k."""

    def passes(n: int) -> float:
        x = (threshold - 1 / math.sqrt(n)) / noise_multiplier
        tail = 0.5 * math.erfc(x / math.sqrt(2))  # 1 − Φ(x), exact far out
        return 1.0 if tail >= 1 else -math.expm1(n * math.log1p(-tail))

    return max(passes(n) for n in range(1, max_items + 1))


def threshold_for(delta: float, noise_multiplier: float, max_items: int) -> float:
    """The smallest τ with δ_τ ≤ delta, rounded up."""
    if not 0 < delta < 1:
        raise ValueError(f"the vocabulary's delta must lie in (0, 1), not {delta}")
    if not (noise_multiplier > 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier must be positive and finite, not {noise_multiplier}")
    if max_items < 1:
        raise ValueError(f"max_items must be at least 1, not {max_items}")
    low, high = 0.0, 1.0 + 40.0 * noise_multiplier  # Φ(−40) underflows: no δ is smaller
    while high - low > 1e-6 * noise_multiplier:
        middle = (low + high) / 2
        low, high = (low, middle) if spent_delta(middle, noise_multiplier, max_items) <= delta else (middle, high)
    return high


def last_distinct(users: np.ndarray, items: np.ndarray, max_items: int) -> np.ndarray:
    """Rows (ascending) that hold each user's last `max_items` distinct items. `users` must be sorted.

    Which items a user keeps depends on that user's rows alone, so the cap costs no privacy.
    """
    backwards = np.arange(len(users))[::-1]
    pairs = users[backwards].astype(np.int64) * (int(items.max(initial=0)) + 1) + items[backwards]
    rows = np.sort(backwards[np.unique(pairs, return_index=True)[1]])  # the last row of each (user, item)
    kept = users[rows]
    stops = np.searchsorted(kept, kept, side="right")
    return rows[stops - np.arange(len(rows)) <= max_items]


def exact_counts(users: np.ndarray, items: np.ndarray, max_items: int) -> np.ndarray:
    """Σ_u 1/√n_u over the users who keep an item, for item 0, 1, …: without noise, not to be released."""
    rows = last_distinct(users, items, max_items)
    lengths = np.bincount(users[rows])  # n_u; users are numbered from 0
    return np.bincount(items[rows], weights=1 / np.sqrt(lengths[users[rows]]))


def sparse_histogram(
    users: np.ndarray,
    items: np.ndarray,
    *,
    noise_multiplier: float,
    delta: float,
    max_items: int,
    normal: Callable[[int], np.ndarray],
) -> SparseHistogram:
    """Releases the common items of a log sorted by user and time.

    Args:
        users: (rows,) user of each row, ascending.
        items: (rows,) item of each row.
        noise_multiplier: σ, the deviation of the noise in units of one user's L2 contribution.
        delta: what may be spent on the threshold; comes off the total δ.
        max_items: k, distinct items a user contributes.
        normal: draws so many standard normal numbers; a secure source, unless for a test.
    """
    threshold = threshold_for(delta, noise_multiplier, max_items)
    counts = exact_counts(users, items, max_items)
    occurring = np.flatnonzero(counts)
    noisy = counts[occurring] + noise_multiplier * np.asarray(normal(len(occurring)), dtype=np.float64)
    step = public_grid(noise_multiplier)  # the last bits of a float would tell what was added
    noisy = np.round(noisy / step) * step
    released = noisy > threshold + step  # so that rounding lifts nothing over the threshold
    return SparseHistogram(
        items=occurring[released],
        counts=noisy[released],
        noise_multiplier=noise_multiplier,
        threshold=threshold,
        delta=spent_delta(threshold, noise_multiplier, max_items),
        max_items=max_items,
    )
