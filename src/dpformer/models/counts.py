r"""Transition counts: a next-item model read off one differentially private release, with no network and no training.

The release (`counts_release.py`) says of pairs {a, b} how often one follows the other. Everything here is
post-processing of it, by rules fixed beforehand, so it costs no privacy:

- *Noise.* Of the total of a pair 1.5 deviations are taken off (soft threshold): Ŝ = max(S − 1.5·sd, 0).
- *Direction.* The difference D of the two directions is shrunk towards none, D̂ = D·v/(v + sd²), where v = (ηŜ)² and η²
  is what the release itself shows of direction: mean (D² − sd²) over mean (S² − sd²) of clear pairs. Data without order
  give η ≈ 0 and symmetric counts. Then C_ab = (Ŝ + D̂)/2 and C_ba = (Ŝ − D̂)/2.
- *Chances.* T_ab = C_ab / (Σ_b C_ab + 30): a row of few counts is little trusted.
- *Claims.* After a history that ends in x_20, …, x_1 (the latest): c_b = Σ_k α_k T_{x_k b}, α_k ∝ 0.75^k, Σ α_k = 1.
- *Ranking*, `scores`: ln(c_b + 0.01·q_b), q the released popularity, which orders what the counts say nothing of.
- *Probability*, `prior_logits`, for a network that is to learn the rest: ln P,

    P(b) = λ·c_b + (1 − λ·Σ_b c_b)·q_b,    λ = 0.8:

  what the counts do not claim is popularity's, and P sums to 1. (Ranking by P loses 5% of NDCG: a likelihood has to
  insure against everything, the first ten places need not.)

The constants were chosen on validation items of public data; docs/results/counts.md says which and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from dpformer.privacy.arguments import whole
from dpformer.privacy.ledger import Ledger
from dpformer.releases.counts import TransitionRelease, release_transitions

THRESHOLD = 1.5  # deviations taken off every total
CLEAR = 3.0  # deviations above which a pair tells of direction
ROW_PRIOR = 30.0  # counts a row must have to be half trusted
LATEST, FORGETTING = 20, 0.75
TRUST = 0.8  # λ
HINT = 0.01  # of popularity in a ranking


class TransitionCounts(nn.Module):
    """Scores the next item by released transition counts: `fit` it, or load its state.

    State: `popularity` (M,), which sums to 1, and row a of T at places offsets[a]:offsets[a + 1] of `targets` and
    `chances`.
    """

    popularity: Tensor  # (M,) float32
    offsets: Tensor  # (M + 1,) int64
    targets: Tensor  # (K,) int64
    chances: Tensor  # (K,) float32

    def __init__(self, num_items: int, num_transitions: int) -> None:
        super().__init__()
        self.num_items = whole("num_items", num_items, 1)
        self.num_transitions = whole("num_transitions", num_transitions, 0)
        self.arguments: dict[str, Any] = {"num_items": self.num_items, "num_transitions": self.num_transitions}
        self.register_buffer("popularity", torch.full((num_items,), 1 / num_items))
        self.register_buffer("offsets", torch.zeros(num_items + 1, dtype=torch.int64))
        self.register_buffer("targets", torch.zeros(num_transitions, dtype=torch.int64))
        self.register_buffer("chances", torch.zeros(num_transitions))

    @classmethod
    def fit(
        cls,
        histories: Sequence[ArrayLike] | np.ndarray,
        num_items: int,
        noise_multiplier: float,
        *,
        ledger: Ledger,
        offsets: np.ndarray | None = None,
        seed: int | None = None,
    ) -> TransitionCounts:
        """Releases the counts of all histories and makes a model of them.

        Args:
            histories: one row of items a user, in the order of time; or, with `offsets`, all items in one array.
            num_items: size of the public catalogue.
            noise_multiplier: σ of the one Gaussian event that all of it costs: `calibrate(epsilon, delta, 1.0, 1)`.
            ledger: where that event is recorded.
            offsets: (users + 1,) with the items of user u at histories[offsets[u]:offsets[u + 1]].
            seed: for tests only: marks the event as not private.
        """
        if offsets is None:
            rows = [np.asarray(history) for history in histories]
            offsets = np.cumsum([0, *map(len, rows)])
            histories = np.concatenate([row for row in rows if len(row)] or [np.zeros(0, np.int64)])
        release = release_transitions(np.asarray(histories), offsets, num_items, noise_multiplier, seed=seed)
        ledger.add(release.event)
        return cls.from_release(release)

    @classmethod
    def from_release(cls, release: TransitionRelease) -> TransitionCounts:
        """The model of a release: post-processing."""
        num_items = len(release.frequencies.p)
        rows, targets, chances = _chances(release)
        model = cls(num_items, len(rows))
        model.popularity.copy_(torch.from_numpy(release.frequencies.p / release.frequencies.p.sum()))
        model.offsets.copy_(torch.from_numpy(np.searchsorted(rows, np.arange(num_items + 1))))
        model.targets.copy_(torch.from_numpy(targets))
        model.chances.copy_(torch.from_numpy(chances))
        return model.eval()

    def check_state(self) -> None:
        """Raises where a state that was loaded leads outside its own tensors."""
        rising = bool((self.offsets.diff() >= 0).all())
        if not rising or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != self.num_transitions:
            raise ValueError("offsets do not cut the transitions into rows")
        if self.num_transitions and not 0 <= int(self.targets.min()) <= int(self.targets.max()) < self.num_items:
            raise ValueError(f"a transition leads outside the items 0 … {self.num_items - 1}")

    def scores(self, histories: Sequence[ArrayLike]) -> Tensor:
        """(B, M): for ranking, how likely every item comes next after each history; popularity's after an empty one."""
        latest = np.full((len(histories), LATEST), -1)
        for row, history in zip(latest, histories, strict=True):
            items = np.asarray(history, dtype=np.int64)[: -LATEST - 1 : -1]
            row[: len(items)] = items
            if len(items) and not 0 <= items.min() <= items.max() < self.num_items:
                wrong = items[(items < 0) | (items >= self.num_items)][0]
                raise ValueError(f"item {wrong} is outside the vocabulary 0 … {self.num_items - 1}; map ids first")
        claims = self._claims(torch.from_numpy(latest).to(self.popularity.device))
        return claims.add_(self.popularity, alpha=HINT).log_()

    @property
    def max_length(self) -> int:
        """How many items of a history matter, the latest ones."""
        return LATEST

    def next_scores(self, items: Tensor, lengths: Tensor) -> Tensor:
        """`scores` of plain tensors without branches, what an export records: every transition is looked at.

        Args:
            items: (B, L) int64, right-padded with 0, L at most `max_length`.
            lengths: (B,) int64.
        """
        back = lengths[:, None] - 1 - torch.arange(items.shape[1], device=items.device)  # 0 for the latest
        weights = (back >= 0) * FORGETTING ** back.clamp(min=0)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-9)  # α
        nothing = torch.zeros_like(weights[:, :1]) * self.popularity  # (B, M)
        history = nothing.scatter_add(1, items, weights)
        origins = torch.from_numpy(np.repeat(np.arange(self.num_items), np.diff(self.offsets.cpu().numpy())))
        claims = history[:, origins.to(items.device)] * self.chances  # (B, K)
        claims = nothing.scatter_add(1, (torch.zeros_like(items[:, :1]) + self.targets), claims)
        return (claims + HINT * self.popularity).log()

    def prior_logits(self, items: Tensor, lengths: Tensor) -> Tensor:
        """(B, L, M): at each position ln P of the next item, after the items up to it.

        Args:
            items: (B, L) int64, right-padded with 0.
            lengths: (B,) int64; positions beyond mean nothing.
        """
        inside = torch.arange(items.shape[1], device=items.device) < lengths[:, None]
        items = torch.where(inside, items, -1)
        logits = self.popularity.new_empty(*items.shape, self.num_items)
        running, weight = self.popularity.new_zeros(len(items), self.num_items), 0.0
        ones = running.new_ones(len(items))
        for t in range(items.shape[1]):  # one row of T enters the sum, one leaves it: L steps instead of L·LATEST
            running, weight = running * FORGETTING, weight * FORGETTING + 1
            self._add_rows(running, items[:, t], ones)
            if t >= LATEST:
                weight -= FORGETTING**LATEST
                self._add_rows(running, items[:, t - LATEST], ones * -(FORGETTING**LATEST))
            claims = TRUST / weight * running.clamp(min=0)
            rest = 1 - claims.sum(1, keepdim=True)
            logits[:, t] = claims.addcmul_(rest, self.popularity).log_()
        return logits

    def _claims(self, latest: Tensor) -> Tensor:
        """c (R, M) after each row of (R, LATEST) items, the latest first and -1 for none."""
        weights = (latest >= 0) * FORGETTING ** torch.arange(LATEST, device=latest.device)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-9)  # α
        claims = self.popularity.new_zeros(len(latest), self.num_items)
        for items, weight in zip(latest.T, weights.T, strict=True):
            self._add_rows(claims, items, weight)
        return claims

    def _add_rows(self, claims: Tensor, items: Tensor, weight: Tensor) -> None:
        """claims[r] += weight[r]·T[items[r]] for every row r with an item."""
        row = torch.nonzero(items >= 0)[:, 0]
        start, stop = self.offsets[items[row]], self.offsets[items[row] + 1]
        lengths = stop - start
        place = torch.arange(int(lengths.sum()), device=items.device)
        place += torch.repeat_interleave(start - (lengths.cumsum(0) - lengths), lengths)
        row = torch.repeat_interleave(row, lengths)
        added = weight.to(claims.dtype)[row] * self.chances[place]
        claims.view(-1).index_add_(0, row * self.num_items + self.targets[place], added)


def _chances(release: TransitionRelease) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """T without its zeros, by rows: (from (K,), to (K,), chance (K,) float64)."""
    forward, backward = _directed(release)
    items = release.items[release.pairs]  # (pairs, 2)
    rows, targets = np.concatenate([items[:, 0], items[:, 1]]), np.concatenate([items[:, 1], items[:, 0]])
    counts = np.concatenate([forward, backward])
    order = np.lexsort((targets, rows))
    order = order[counts[order] > 0]
    rows, targets, counts = rows[order], targets[order], counts[order]
    sums = np.bincount(rows, weights=counts, minlength=1)
    return rows, targets, counts / (sums[rows] + ROW_PRIOR)


def _directed(release: TransitionRelease) -> tuple[np.ndarray, np.ndarray]:
    """C_ab and C_ba of each pair, by the rules at the top of this file."""
    total = np.maximum(release.total - THRESHOLD * release.total_deviation, 0)
    noise = release.difference_deviation**2
    clear = release.total > CLEAR * release.total_deviation
    order = (release.difference[clear] ** 2 - noise).sum()
    strength = (release.total[clear] ** 2 - release.total_deviation**2).sum()
    eta2 = max(order / strength, 0.0) if clear.any() else 0.0
    prior = eta2 * total**2
    difference = np.clip(release.difference * prior / (prior + noise), -total, total)
    return (total + difference) / 2, (total - difference) / 2
