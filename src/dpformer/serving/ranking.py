"""A released model put to use: the best items for many histories, similar items, and why an item is recommended.

Histories are packed: those of B users are items[offsets[b]:offsets[b + 1]], item numbers in the order of time. Whoever
calls (the batch command, `dp.Recommender`, the service) gets the same answers from the same code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpformer.errors import DpformerError
from dpformer.evaluation import NonFiniteScores
from dpformer.evaluation.evaluate import scorer
from dpformer.models.counts import TransitionCounts
from dpformer.models.evidence import Evidence
from dpformer.runs.model_file import Release

SCORES_AT_ONCE = 1 << 20  # (B, M) that stay in the cache
ADDED = "share of the evidence that each item of the history brings; the rest is the item's popularity"
LEFT_OUT = "how much the score falls when the item is left out of the history"


@dataclass(frozen=True)
class Top:
    """The k best items of each history, the best first; -1 and -inf where there are fewer."""

    items: np.ndarray  # (B, k) int64
    scores: np.ndarray  # (B, k) float32


class Ranker:
    """Ranks items by a released model. Counts go through sparse products, networks through `scores`."""

    def __init__(self, release: Release) -> None:
        if "text" in release.metadata:
            raise DpformerError("this is a language model, which recommends nothing: use dpformer generate")
        self.release = release
        self.num_items = len(release.vocabulary)
        counts = isinstance(release.model, TransitionCounts)
        self.evidence = Evidence(release.model) if counts else None
        self._profiles: Any = None

    @property
    def quick(self) -> bool:
        """Whether one answer takes well under a millisecond."""
        return self.evidence is not None

    def top(self, items: np.ndarray, offsets: np.ndarray, k: int, *, filter_seen: bool = True) -> Top:
        """The k best items of each history, without those in it unless `filter_seen` is off."""
        parts = [part for part, _ in self.blocks(items, offsets, k, filter_seen=filter_seen)]
        if not parts:
            return Top(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32))
        return Top(np.concatenate([p.items for p in parts]), np.concatenate([p.scores for p in parts]))

    def blocks(
        self, items: np.ndarray, offsets: np.ndarray, k: int, *, filter_seen: bool = True
    ) -> Iterator[tuple[Top, slice]]:
        """`top` in blocks of histories, for progress and little memory: each with the histories it is of."""
        if k < 1:
            raise DpformerError(f"k is {k}; it must be 1 or more")
        size, users = max(1, SCORES_AT_ONCE // self.num_items), len(offsets) - 1
        parts = [slice(start, min(users, start + size)) for start in range(0, users, size)]

        def work(part: slice) -> Top:
            first, last = offsets[part.start], offsets[part.stop]
            return self._block(items[first:last], offsets[part.start : part.stop + 1] - first, k, filter_seen)

        workers = len(os.sched_getaffinity(0)) if self.quick else 1  # a network has threads of its own
        if min(workers, len(parts)) <= 1:
            yield from ((work(part), part) for part in parts)
            return
        with ThreadPoolExecutor(workers) as pool:  # sparse products and topk run outside of Python's lock
            yield from zip(pool.map(work, parts), parts, strict=True)

    def _block(self, items: np.ndarray, offsets: np.ndarray, k: int, filter_seen: bool) -> Top:
        scores = self._scores(items, offsets)
        if filter_seen:
            scores[np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), items] = -np.inf
        values, best = torch.from_numpy(scores).topk(min(k, self.num_items))
        found, chosen = values.numpy(), best.numpy()
        if self.evidence is not None:
            found = np.where(found > 0, np.log(np.maximum(found, np.finfo(np.float32).tiny)), -np.inf)
        chosen = np.where(np.isfinite(found), chosen, -1)
        if found.shape[1] == k:
            return Top(chosen, found)
        gap = ((0, 0), (0, k - found.shape[1]))
        return Top(np.pad(chosen, gap, constant_values=-1), np.pad(found, gap, constant_values=-np.inf))

    def _scores(self, items: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(B, M), for ranking: evidence of counts, which grows with the score; else scores."""
        if self.evidence is not None:
            return self.evidence.of(items, offsets)
        with torch.no_grad():
            scores = scorer(self.release.model)(np.split(items, offsets[1:-1]))
        if not bool(torch.isfinite(scores).all()):
            raise NonFiniteScores("the model's scores are not finite: it has diverged in training")
        return scores.numpy()

    # Why.

    @property
    def method(self) -> str:
        """What the numbers of `contributions` are."""
        return ADDED if self.evidence is not None else LEFT_OUT

    def contributions(self, history: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What each place of one history did for each of some items, (L, n), and what popularity did, (n,).

        For counts shares, which sum to 1 with popularity's. For networks the change of the score when the place is
        left out, which sums to nothing in particular; popularity's is then NaN.
        """
        if self.evidence is not None:
            added = self.evidence.parts(history, items)
            shares = added / added.sum(0)
            return shares[:-1], shares[-1]
        without = [history, *(np.delete(history, place) for place in range(len(history)))]
        with torch.no_grad():
            scores = scorer(self.release.model)(without)[:, torch.from_numpy(items)].double().numpy()
        return scores[0] - scores[1:], np.full(len(items), np.nan)

    def attributes_behind(self, history: np.ndarray, items: np.ndarray) -> list[list[str | None]]:
        """The name of the public attribute behind each contribution, (L, n); None where it is the item itself."""
        if self.evidence is None:
            return [[None] * len(items) for _ in history]
        names = self.release.model.attribute_names
        numbers = self.evidence.attributes_behind(history, items).tolist()
        return [[None if one < 0 else ": ".join(names[one]) for one in row] for row in numbers]

    # Similar items.

    def similar(self, item: int, k: int) -> Top:
        """The k items most like one: cosine of embeddings or, for counts, of what follows them; never 0 or less."""
        cosines = self._cosines(item)
        cosines[item] = 0
        best = np.argsort(-cosines, kind="stable")[:k]
        best = best[cosines[best] > 0]
        return Top(best[None], cosines[best][None])

    def _cosines(self, item: int) -> np.ndarray:
        if self._profiles is None:
            self._profiles = self._unit_profiles()
        row = self._profiles[[item]]
        product = self._profiles @ row.T
        return np.asarray(product.toarray() if self.evidence is not None else product, dtype=np.float32).ravel()

    def _unit_profiles(self) -> Any:
        """(M, ·) rows of length 1, or 0 where nothing is known of an item."""
        if self.evidence is not None:
            rows = self.evidence.transitions
            norms = np.sqrt(rows.multiply(rows).sum(1))
            return rows.multiply(1 / np.maximum(norms, 1e-30)[:, None]).tocsr()
        vectors = self.release.model.output_weight().detach().cpu().numpy()
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
