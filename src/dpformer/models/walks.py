r"""Evidence for one pair from the rest of a release: items followed by the same items often follow each other.

A released total may be noise; two-step walks a → c → b over *other* pairs show how likely that is. With X the totals
above 1.5 standard deviations (symmetric, minus those 1.5), x_a = Σ_b X_ab and d = x + 30, the walks from a to b weigh

    Y_ab = Σ_c X_ac X_cb / d_c,      y_a = Σ_b Y_ab,

and l_ab = ln(Y_ab / √(y_a y_b x_a x_b / (Σx)²)) is the log-ratio to chance, limited to ln 0.02 … ln 50. The total of
a pair is in no walk from a to b, so no pair confirms itself. The amount subtracted for noise is reduced by ¼·(l_ab − 1)
standard deviations. A release without noise needs none of this.

Post-processing of a release, so it is free. docs/results/counts.md has the gain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from dpformer.queries.transitions.rounds import TransitionRelease

SEEN = 1.5  # standard deviations above zero
PRIOR = 30.0  # counts
SLOPE, USUAL = 0.25, 1.0  # standard deviations per ln of the lift; the ln at which nothing changes
LEAST, MOST = 0.02, 50.0
HIGHEST_THRESHOLD = 5.0
AT_ONCE = 1 << 23  # entries of Y
WORK = 1 << 29  # maximum number of walks; if there are more, only pairs further above zero are used


def with_walks(thresholds: float | np.ndarray, release: TransitionRelease) -> np.ndarray:
    """Standard deviations to subtract from each released total (K,), given those to subtract without walks."""
    if release.total_deviation == 0 or not len(release.total):
        return np.broadcast_to(thresholds, release.total.shape)
    return np.clip(thresholds - SLOPE * (log_lifts(release) - USUAL), 0, HIGHEST_THRESHOLD)


def log_lifts(release: TransitionRelease) -> np.ndarray:
    """l of each released pair (K,)."""
    from scipy.sparse import csr_array, diags_array

    size = len(release.items)
    first, second = release.pairs.T
    total = np.maximum(release.total - SEEN * release.total_deviation, 0)
    seen = _followed(release, total)
    a, b, total = first[seen], second[seen], total[seen]
    table = csr_array((np.r_[total, total], (np.r_[a, b], np.r_[b, a])), shape=(size, size))  # X
    x = np.asarray(table.sum(1)).ravel()
    onward = diags_array(1 / (x + PRIOR)) @ table  # X_cb / d_c
    y = table @ np.asarray(onward.sum(1)).ravel()
    walks = _products(table, onward.tocsr(), first, second)
    chance = np.sqrt(y[first] * y[second] * x[first] * x[second]) / max(x.sum(), 1e-300)
    return np.log(np.clip(walks / np.maximum(chance, 1e-300), LEAST, MOST))


def _followed(release: TransitionRelease, total: np.ndarray) -> np.ndarray:
    """(K,) bool: pairs that walks may use: all visible ones, or as many of the clearest as `WORK` allows."""
    least = 0.0
    while True:
        seen = total > least
        degrees = np.bincount(release.pairs[seen].ravel()).astype(np.float64)
        if float(degrees @ degrees) <= WORK:
            return seen
        least = 2 * least + 0.5 * release.total_deviation


def _products(left: csr_array, right: csr_array, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(left @ right)[rows, columns], in blocks of rows."""
    found = np.zeros(len(rows))
    size = left.shape[0]
    order = np.argsort(rows, kind="stable")
    step = max(1, AT_ONCE // max(size, 1))
    for start in range(0, size, step):
        inside = order[slice(*np.searchsorted(rows[order], [start, start + step]))]
        if len(inside):
            block = (left[start : start + step] @ right).toarray()
            found[inside] = block[rows[inside] - start, columns[inside]]
    return found
