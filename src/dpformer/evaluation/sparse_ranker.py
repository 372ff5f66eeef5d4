r"""Ranking by scores that consist of popularity plus, for few items, a claim: transition counts, or popularity alone.

    s_b = c_b + p_b,    c ≥ 0, zero for most items b

Among the items ranked before a target of score s_t, those with p_b ≥ s_t are counted by one search in the sorted p, and
those with p_b < s_t ≤ c_b + p_b are among the few with a claim c_b: the work is proportional to the claims.
Floating-point addition is monotonic, so there are no others. These are the numbers by which recommendations are sorted
(`models.evidence`), compared unchanged. If claims are not few, comparing all items is faster, and is done instead.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dpformer.evaluation.rankers import SCORES_AT_ONCE, Histories, Placed, first_of, joined, placed
from dpformer.evaluation.ranking import NonFiniteScores
from dpformer.models.evidence import Evidence

FEW = 1 / 16  # share of claims above which comparing all items is faster
Claims = Callable[[Histories], Any]  # → sparse matrix (B, M) by rows; or all scores (B, M) if claims are not few


class SparseRanker:
    """See above, and `rankers.Ranker`."""

    def __init__(self, popularity: np.ndarray, claims: Claims | None = None) -> None:
        """
        Args:
            popularity: p (M,), finite.
            claims: c of some histories, of the same type as p; None: popularity alone.
        """
        if not np.isfinite(popularity).all():
            raise NonFiniteScores("the popularity of an item is not finite")
        self.popularity, self.claims, self.num_items = popularity, claims, len(popularity)
        self.ascending = np.sort(popularity)
        self.order = np.lexsort((np.arange(len(popularity)), -popularity))  # most popular first

    @classmethod
    def of_counts(cls, evidence: Evidence) -> "SparseRanker":
        def claims(histories: Histories) -> Any:
            given, size = (histories.items, histories.offsets), len(histories) * len(evidence.popularity)
            return evidence.of(*given) if evidence.work(*given) > FEW * size else evidence.claims(*given)

        return cls(evidence.popularity, claims)

    def place(self, histories: Histories, targets: np.ndarray, k: int = 0, *, allow_seen: bool = False) -> Placed:
        size = max(1, SCORES_AT_ONCE // self.num_items)
        parts = [(start, min(start + size, len(targets))) for start in range(0, len(targets), size)]

        def work(part: tuple[int, int]) -> Placed:
            return self._block(histories.some(*part), targets[slice(*part)], k, allow_seen)

        threads = min(torch.get_num_threads(), len(parts))
        if threads <= 1:
            return joined([work(part) for part in parts], k)
        with ThreadPoolExecutor(threads) as pool:  # products release Python's lock
            return joined(list(pool.map(work, parts)), k)

    def _block(self, histories: Histories, targets: np.ndarray, k: int, allow_seen: bool) -> Placed:
        found = None if self.claims is None else self.claims(histories)
        if found is None:
            return _Block(self, None, histories, targets).place(k, allow_seen)
        dense = isinstance(found, np.ndarray)
        if found.size and not np.isfinite([end(found if dense else found.data) for end in (np.min, np.max)]).all():
            raise NonFiniteScores("the claims of counts are not finite")
        if dense:
            return placed(found, histories, targets, k, allow_seen)
        if found.nnz <= FEW * len(targets) * self.num_items:
            return _Block(self, found, histories, targets).place(k, allow_seen)
        scores = found.toarray()
        scores += self.popularity
        return placed(scores, histories, targets, k, allow_seen)


class _Block:
    """Some users: the claims of their histories as (row, item, claim), with lookups."""

    def __init__(self, ranker: SparseRanker, found: Any, histories: Histories, targets: np.ndarray) -> None:
        self.ranker, self.targets, self.size = ranker, targets, ranker.num_items
        self.seen = histories.seen(self.size)
        self.dense: np.ndarray | None = None
        self.row = self.item = np.zeros(0, np.int64)
        self.starts = np.zeros(len(targets) + 1, np.int64)
        self.score = ranker.popularity[:0]
        if found is None:
            return
        self.row, self.item = np.repeat(np.arange(len(targets)), np.diff(found.indptr)), found.indices
        self.score = found.data + ranker.popularity[self.item]
        self.starts = found.indptr
        self.dense = found.toarray()

    def place(self, k: int, allow_seen: bool) -> Placed:
        users = len(self.targets)
        of_target = self._scores(np.arange(users), self.targets)
        by_popularity = self.size - np.searchsorted(self.ranker.ascending, of_target, side="left")
        threshold = of_target[self.row]
        lifted = (self.score >= threshold) & (self.ranker.popularity[self.item] < threshold)
        unmasked = by_popularity + np.bincount(self.row[lifted], minlength=users)
        row, item = self.seen
        ahead = (self._scores(row, item) >= of_target[row]) & (item != self.targets[row])
        masked = unmasked - np.bincount(row[ahead], minlength=users)
        return Placed(unmasked, masked, self._first(k, allow_seen) if k else np.zeros((users, 0), np.int64))

    def _scores(self, row: np.ndarray, item: np.ndarray) -> np.ndarray:
        of_popularity = self.ranker.popularity[item]
        return of_popularity if self.dense is None else np.asarray(self.dense[row, item] + of_popularity)

    def _first(self, k: int, allow_seen: bool) -> np.ndarray:
        """The best are among the k most popular allowed items and the claims that reach the last of these."""
        users, (row, item) = len(self.targets), self.seen
        left_out = np.zeros((users, self.size), dtype=bool)
        if not allow_seen:
            left_out[row, item] = True
        most = min(self.size, k + (0 if allow_seen else int(np.bincount(row, minlength=1).max())))
        popular = self.ranker.order[:most]  # leaves at least k for every user, if there are that many
        rows, places = np.nonzero(~left_out[:, popular])
        items = popular[places]
        nth = np.arange(len(rows)) - np.searchsorted(rows, np.arange(users))[rows]
        rows, items = rows[nth < k], items[nth < k]
        least = np.full(users, -np.inf)  # the score needed to be among the first k
        full = np.bincount(rows, minlength=users) == k
        last = np.searchsorted(rows, np.arange(users), side="right") - 1
        least[full] = self.ranker.popularity[items[last[full]]]
        score = np.where(left_out[self.row, self.item], -np.inf, self.score)
        least = np.maximum(least, _last_of_best(score, self.starts, k))
        chosen = (score >= least[self.row]) & (score > -np.inf)
        keys = np.unique(np.concatenate([rows * self.size + items, self.row[chosen] * self.size + self.item[chosen]]))
        rows, items = keys // self.size, keys % self.size
        return first_of(rows, items, self._scores(rows, items), users, k)


def _last_of_best(score: np.ndarray, starts: np.ndarray, k: int) -> np.ndarray:
    """(B,): the k-th best of score[starts[b]:starts[b + 1]]; -∞ if there are fewer."""
    found = np.full(len(starts) - 1, -np.inf)
    for row in np.flatnonzero(np.diff(starts) >= k):
        of_row = score[starts[row] : starts[row + 1]]
        found[row] = np.partition(of_row, len(of_row) - k)[len(of_row) - k]
    return found
