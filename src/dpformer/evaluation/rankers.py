r"""Ranks of held-out items, at a cost proportional to the non-zero scores.

A `Ranker` ranks the targets of some users among all items, and returns their first k items. Ties count against the
target, as in `ranking.ranks`, the dense twin. With score s_b of item b and target t the rank is #{b : s_b ≥ s_t}:

    any scores      every item is compared
    networks        s = h·Eᵀ + bias, in blocks of users, for all items, in one reused buffer
    counts          through the non-zero entries: `sparse_ranker.SparseRanker`; popularity too

Items of the data that a model lacks rank after all its own items, tied with one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.evaluation.ranking import NonFiniteScores, ranks
from dpformer.models.batch import Batch, padded
from dpformer.models.sequence import SequenceModel

ScoreFunction = Callable[[list[np.ndarray]], Tensor]  # histories of B users → scores (B, M)
SCORES_AT_ONCE = 1 << 22  # users × items processed together: 16 MB
GROUP = 64  # group size for which the maximum is examined first
TOKENS_AT_ONCE = 1 << 15  # items of histories that a network processes together


@dataclass(frozen=True)
class Histories:
    """Histories of B users: items[offsets[b]:offsets[b + 1]], complete and in order of time."""

    items: np.ndarray  # (n,)
    offsets: np.ndarray  # (B + 1,) int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def rows(self) -> np.ndarray:  # (n,)
        """The user of each item."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def seen(self, num_items: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct (user, item) pairs of the histories."""
        keys = np.unique(self.rows * num_items + self.items)
        return keys // num_items, keys % num_items

    def split(self) -> list[np.ndarray]:
        """One array per user."""
        return np.split(self.items, self.offsets[1:-1])

    def some(self, first: int, last: int) -> Histories:
        """The histories of users first … last - 1."""
        return Histories(
            self.items[self.offsets[first] : self.offsets[last]], self.offsets[first : last + 1] - self.offsets[first]
        )


@dataclass(frozen=True)
class Placed:
    """Ranks of the targets of B users, from 1, and the first items for each."""

    unmasked: np.ndarray  # (B,) int64, rank among all items
    masked: np.ndarray  # (B,) int64, rank among items outside the history, and the target
    first: np.ndarray  # (B, k) int64, best first, ties by number; padded with -1


@runtime_checkable
class Ranker(Protocol):
    """Ranks targets among `num_items` items."""

    num_items: int

    def place(self, histories: Histories, targets: np.ndarray, k: int = 0, *, allow_seen: bool = False) -> Placed:
        """Ranks of `targets` (B,), and the first `k` items, excluding the history unless `allow_seen`."""


class DenseRanker:
    """Any scores: every item of every user is compared. The naive twin of the others."""

    def __init__(self, score: ScoreFunction, num_items: int) -> None:
        self.score, self.num_items = score, num_items

    def place(self, histories: Histories, targets: np.ndarray, k: int = 0, *, allow_seen: bool = False) -> Placed:
        return in_blocks(self._block, histories, targets, self.num_items, k, allow_seen)

    def _block(self, histories: Histories, targets: np.ndarray, k: int, allow_seen: bool) -> Placed:
        with torch.no_grad():
            scores = self.score(histories.split()).cpu()
        if scores.shape != (len(targets), self.num_items):
            raise ValueError(f"scores have shape {tuple(scores.shape)}, not {(len(targets), self.num_items)}")
        unmasked = ranks(scores, torch.from_numpy(targets)).numpy()
        found = placed(scores.numpy().copy() if k else scores.numpy(), histories, targets, k, allow_seen)
        return Placed(unmasked, found.masked, found.first)


class NetworkRanker:
    """A model with scores h Eᵀ + bias: hidden states of many users, then products into one buffer."""

    def __init__(self, model: SequenceModel) -> None:
        self.model, self.num_items = model, model.num_items
        self.weight = model.output_weight().detach()[: self.num_items]
        self.bias = model.bias.detach()[: self.num_items]
        self.largest = float(self.weight.abs().max()), float(self.bias.abs().max())
        self.buffer = torch.empty(0)

    def place(self, histories: Histories, targets: np.ndarray, k: int = 0, *, allow_seen: bool = False) -> Placed:
        states = self._states(histories.split())  # (B, d)
        at = 0

        def block(part: Histories, of: np.ndarray, k: int, allow_seen: bool) -> Placed:
            nonlocal at
            at += len(part)
            scores = self._scores(states[at - len(part) : at])
            return placed(scores, part, of, k, allow_seen)

        return in_blocks(block, histories, targets, self.num_items, k, allow_seen)

    def _states(self, histories: list[np.ndarray]) -> Tensor:
        size = max(1, TOKENS_AT_ONCE // self.model.max_length)
        lengths = padded(np.array([len(history) for history in histories]), self.model.max_length)
        states = torch.empty(len(histories), self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device)
        with torch.no_grad():
            for length in np.unique(lengths):  # one length at a time, so that no user's rounding depends on others
                of_length = np.flatnonzero(lengths == length)
                for rows in np.split(of_length, range(size, len(of_length), size)):
                    batch = Batch.for_scores([histories[row] for row in rows], self.model.max_length)
                    batch = batch.alike(self.model.max_length).to(states.device)
                    states[torch.from_numpy(rows)] = self.model.final_state(batch)[: len(rows)]
        # If no product can overflow, the scores need not be checked for it.
        bound = float(states.abs().max()) * self.largest[0] * states.shape[1] + self.largest[1] if len(states) else 0.0
        if not bound < torch.finfo(torch.float32).max:
            raise NonFiniteScores("the model's scores are not finite: training has diverged")
        return states

    def _scores(self, states: Tensor) -> np.ndarray:
        users = len(states)
        states = F.pad(states, (0, 0, 0, -users % 32))  # the summation order depends on the number of rows
        if self.buffer.shape[:1] < states.shape[:1]:
            self.buffer = states.new_empty(len(states), self.num_items)  # allocating costs more than the product
        with torch.no_grad():
            scores = torch.addmm(self.bias, states, self.weight.T, out=self.buffer[: len(states)])
        return scores[:users].cpu().numpy()


class KnownItems:
    """A ranker for a model with other items than the data: items that it lacks rank last, tied."""

    def __init__(self, inner: Ranker, numbers: np.ndarray) -> None:
        """`numbers` (items of the data,) are the model's item numbers, -1 if missing."""
        self.inner, self.numbers, self.num_items = inner, numbers, len(numbers)
        self.back = np.full(inner.num_items, -1, dtype=np.int64)
        self.back[numbers[numbers >= 0]] = np.flatnonzero(numbers >= 0)

    def place(self, histories: Histories, targets: np.ndarray, k: int = 0, *, allow_seen: bool = False) -> Placed:
        mapped, wanted = self.numbers[histories.items], self.numbers[targets]
        known, has = mapped >= 0, wanted >= 0
        lengths = np.bincount(histories.rows[known], minlength=len(histories))
        inner = Histories(mapped[known], np.concatenate([[0], np.cumsum(lengths)]))
        found = self.inner.place(inner, np.where(has, wanted, 0), k, allow_seen=allow_seen)
        row, item = histories.seen(self.num_items)
        others = np.bincount(row[item != targets[row]], minlength=len(targets))  # all of them rank before
        first = np.where(found.first >= 0, self.back[found.first], -1)
        return Placed(
            np.where(has, found.unmasked, self.num_items), np.where(has, found.masked, self.num_items - others), first
        )


def in_blocks(
    block: Callable[[Histories, np.ndarray, int, bool], Placed],
    histories: Histories,
    targets: np.ndarray,
    num_items: int,
    k: int,
    allow_seen: bool,
) -> Placed:
    """Call `block` for blocks of users, such that users × items stays small."""
    size = max(1, SCORES_AT_ONCE // num_items)
    parts = [
        block(histories.some(start, min(start + size, len(targets))), targets[start : start + size], k, allow_seen)
        for start in range(0, len(targets), size)
    ]
    return joined(parts, k)


def joined(parts: list[Placed], k: int) -> Placed:
    """Concatenate parts of the users."""
    nobody = np.zeros(0, np.int64)
    return Placed(
        np.concatenate([nobody, *(part.unmasked for part in parts)]),
        np.concatenate([nobody, *(part.masked for part in parts)]),
        np.concatenate([np.zeros((0, k), np.int64), *(part.first for part in parts)]),
    )


def placed(scores: np.ndarray, histories: Histories, targets: np.ndarray, k: int, allow_seen: bool) -> Placed:
    """From all scores (B, M), finite, which are overwritten unless `k` is 0."""
    of_target = scores[np.arange(len(targets)), targets]
    counted = [np.count_nonzero(row >= own) for row, own in zip(scores, of_target, strict=True)]  # rows stay in cache
    unmasked = np.array(counted, dtype=np.int64)
    row, item = histories.seen(scores.shape[1])
    ahead = (scores[row, item] >= of_target[row]) & (item != targets[row])
    masked = unmasked - np.bincount(row[ahead], minlength=len(targets))
    if not k:
        return Placed(unmasked, masked, np.zeros((len(targets), 0), np.int64))
    if not allow_seen:
        scores[row, item] = -np.inf
    return Placed(unmasked, masked, _first_items(scores, k))


def _first_items(scores: np.ndarray, k: int) -> np.ndarray:
    """The k best items: among those that reach the k-th largest of the group maxima, which k items do at least."""
    users, size = scores.shape
    groups = size // GROUP
    best = scores[:, : groups * GROUP].reshape(users, GROUP, groups).max(1) if groups >= k else scores
    place = best.shape[1] - min(k, best.shape[1])
    least = np.partition(best, place, axis=1)[:, place]
    row, item = np.divmod(np.flatnonzero(scores >= least[:, None]), size)  # ten times as fast in one dimension
    score = scores[row, item]
    there = np.isfinite(score)
    return first_of(row[there], item[there], score[there], users, k)


def first_of(row: np.ndarray, item: np.ndarray, score: np.ndarray, users: int, k: int) -> np.ndarray:
    """(users, k): the best of some candidates, ties by number, padded with -1."""
    order = np.lexsort((item, -score, row))
    row, item = row[order], item[order]
    place = np.arange(len(row)) - np.searchsorted(row, np.arange(users))[row]
    found = np.full((users, k), -1, dtype=np.int64)
    found[row[place < k], place[place < k]] = item[place < k]
    return found
