"""A released model in use: the best items for many histories, similar items, and reasons for a recommendation.

Histories are packed: those of B users are items[offsets[b]:offsets[b + 1]], item numbers in order of time. All callers
(the batch command, `dp.Recommender`, the service) get the same answers from the same code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpformer.errors import DpformerError
from dpformer.kinds.registry import kind_of
from dpformer.runs.model_file import Release
from dpformer.serving.rules import NO_RULES, BoundRules

SCORES_AT_ONCE = 1 << 20  # (B, M) scores that fit in the cache


@dataclass(frozen=True)
class Top:
    """The k best items of each history, best first; padded with -1 and -inf."""

    items: np.ndarray  # (B, k) int64
    scores: np.ndarray  # (B, k) float32


class Ranker:
    """Rank items by the scores of a released model (`kinds.scoring`)."""

    def __init__(self, release: Release) -> None:
        if "text" in release.metadata:
            raise DpformerError("this is a language model, which cannot recommend items: use dpformer generate")
        self.release = release
        self.num_items = len(release.vocabulary)
        self.scoring = kind_of(release.model).scoring(release.model)
        self._profiles: Any = None

    @property
    def quick(self) -> bool:
        """Whether one answer takes well under a millisecond."""
        return self.scoring.quick

    def top(
        self,
        items: np.ndarray,
        offsets: np.ndarray,
        k: int,
        *,
        filter_seen: bool = True,
        rules: BoundRules | None = None,
    ) -> Top:
        """The k best items of each history that `rules` allow, excluding its own items unless `filter_seen` is off."""
        parts = [part for part, _ in self.blocks(items, offsets, k, filter_seen=filter_seen, rules=rules)]
        if not parts:
            return Top(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32))
        return Top(np.concatenate([p.items for p in parts]), np.concatenate([p.scores for p in parts]))

    def blocks(
        self,
        items: np.ndarray,
        offsets: np.ndarray,
        k: int,
        *,
        filter_seen: bool = True,
        rules: BoundRules | None = None,
    ) -> Iterator[tuple[Top, slice]]:
        """`top` in blocks of histories, for progress and little memory: each with the slice of histories it covers."""
        if k < 1:
            raise DpformerError(f"k is {k}; it must be 1 or more")
        size, users = max(1, SCORES_AT_ONCE // self.num_items), len(offsets) - 1
        parts = [slice(start, min(users, start + size)) for start in range(0, users, size)]

        def work(part: slice) -> Top:
            first, last = offsets[part.start], offsets[part.stop]
            return self._block(items[first:last], offsets[part.start : part.stop + 1] - first, k, filter_seen, rules)

        workers = len(os.sched_getaffinity(0)) if self.quick else 1
        if min(workers, len(parts)) <= 1:
            yield from ((work(part), part) for part in parts)
            return
        with ThreadPoolExecutor(workers) as pool:
            yield from zip(pool.map(work, parts), parts, strict=True)

    def _block(
        self, items: np.ndarray, offsets: np.ndarray, k: int, filter_seen: bool, rules: BoundRules | None
    ) -> Top:
        scores = self.scoring.scores(items, offsets)
        if filter_seen:
            scores[np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), items] = -np.inf
        best, values = (rules or NO_RULES).choose(scores, k)
        found, chosen = self.scoring.shown(values), best
        chosen = np.where(np.isfinite(found), chosen, -1)
        if found.shape[1] == k:
            return Top(chosen, found)
        gap = ((0, 0), (0, k - found.shape[1]))
        return Top(np.pad(chosen, gap, constant_values=-1), np.pad(found, gap, constant_values=-np.inf))

    # Reasons.

    @property
    def method(self) -> str:
        """The meaning of the numbers of `contributions`."""
        return self.scoring.method

    def contributions(self, history: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The contribution of each position of a history to each item, (L, n), and of popularity, (n,) or NaN."""
        return self.scoring.contributions(history, items)

    def attributes_behind(self, history: np.ndarray, items: np.ndarray) -> list[list[str | None]]:
        """The name of the public attribute behind each contribution, (L, n); None if it is the item itself."""
        return self.scoring.attributes_behind(history, items)

    # Similar items.

    def similar(self, item: int, k: int) -> Top:
        """The k items most similar to one, by the cosine of their profiles; similarities are above 0."""
        cosines = self._cosines(item)
        cosines[item] = 0
        best = np.argsort(-cosines, kind="stable")[:k]
        best = best[cosines[best] > 0]
        return Top(best[None], cosines[best][None])

    def _cosines(self, item: int) -> np.ndarray:
        if self._profiles is None:
            self._profiles = self.scoring.profiles()
        product = self._profiles @ self._profiles[[item]].T
        return np.asarray(product if isinstance(product, np.ndarray) else product.toarray(), dtype=np.float32).ravel()
