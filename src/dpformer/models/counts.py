r"""Transition counts: a next-item model from one differentially private release, without network or training.

The release (`queries/transitions`) estimates for pairs {a, b} how often one follows the other. Everything here is
post-processing of it, by rules fixed beforehand, so it costs no privacy:

- *Noise.* 1.5 standard deviations are subtracted from the total of a pair (soft threshold): Ŝ = max(S − 1.5·sd, 0);
more if other pairs make it unlikely, less if they support it (`walks.py`); likewise with attributes (`backoff.py`).
What is left is scaled by how far the last round confirms it (`confirmed.py`).
- *Direction.* The difference D of the two directions is shrunk towards zero, D̂ = D·v/(v + sd²), where v = (ηŜ)² and η²
is estimated from the release itself: mean (D² − sd²) over mean (S² − sd²) of clear pairs. Data without order give
η ≈ 0 and symmetric counts. Then C_ab = (Ŝ + D̂)/2 and C_ba = (Ŝ − D̂)/2.
- *Probabilities.* T_ab = C_ab / (Σ_b C_ab + 30): a row with few counts is trusted little. With attributes, rows are
slightly evened out (`backoff.py`).
- *Repeats.* T_aa = ρ (`repeat_weight`, usually 0) for data in which users come back to items: an item of the history
  claims itself. The release has no such pairs; ρ is an option, or chosen from the released share of repeats.
- *Claims.* After a history that ends in x_20, …, x_1 (the latest): c_b = Σ_k α_k (T + μK)_{x_k b}, α_k ∝ 0.75^k,
  or 1/k if attributes say much, Σ α_k = 1; K, the back-off to public attributes of items (`backoff.py`), if any.
- *Ranking*, `scores`: ln(c_b + 0.01·q_b), q the released popularity, which ranks items without counts.

The constants were chosen on validation items of public data; see docs/results/counts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from dpformer.accounting.arguments import whole
from dpformer.accounting.ledger import Ledger
from dpformer.data.attributes import Attributes, Name
from dpformer.data.near_pairs import near_pairs
from dpformer.models.backoff import PLAIN_THRESHOLD, fit_backoff
from dpformer.models.confirmed import confirmation
from dpformer.models.explain import Explanation, explain
from dpformer.models.exported_sums import product_with_columns, sum_of_rows
from dpformer.models.history import LATEST, add_rows, latest_items, row_of, weights_of
from dpformer.models.walks import with_walks
from dpformer.queries.transitions.prior import combined
from dpformer.queries.transitions.rounds import TransitionRelease, nothing_released, release_transitions

if TYPE_CHECKING:
    from scipy.sparse import csr_array

CLEAR = 3.0  # standard deviations above which a pair is used to estimate direction
ROW_PRIOR = 30.0  # number of counts at which a row is half trusted
HINT = 0.01  # weight of popularity in a ranking


class TransitionCounts(nn.Module):
    """Score the next item by released transition counts: `fit` it, or load its state.

    State: `popularity` (M,), which sums to 1, and row a of T at offsets[a]:offsets[a + 1] of `targets` and
    `chances`. With G attributes also A, those of item a at attribute_offsets[a]:attribute_offsets[a + 1] of
    `attribute_links`, and the parts of K: w, `pull` q^0.6/√d and `backoff` μ. `attribute_names` are saved separately.
    """

    popularity: Tensor  # (M,) float32
    offsets: Tensor  # (M + 1,) int64
    targets: Tensor  # (K,) int64
    chances: Tensor  # (K,) float32
    attribute_offsets: Tensor  # (M + 1,) int64
    attribute_links: Tensor  # (n,) int64
    attribute_weights: Tensor  # (G,) float32
    pull: Tensor  # (M,) float32
    backoff: Tensor  # () float32

    def __init__(
        self,
        num_items: int,
        num_transitions: int,
        num_attributes: int = 0,
        num_links: int = 0,
        harmonic: bool = False,
    ) -> None:
        super().__init__()
        self.num_items = whole("num_items", num_items, 1)
        self.num_transitions = whole("num_transitions", num_transitions, 0)
        self.num_attributes = whole("num_attributes", num_attributes, 0)
        self.num_links = whole("num_links", num_links, 0)
        if not isinstance(harmonic, bool):
            raise ValueError(f"harmonic is {harmonic!r}; it must be true or false")
        self.harmonic = harmonic  # whether the k-th latest item of a history weighs 1/k
        self.arguments: dict[str, Any] = {"num_items": self.num_items, "num_transitions": self.num_transitions}
        self.attribute_names: list[Name] = []
        self.register_buffer("popularity", torch.full((num_items,), 1 / num_items))
        self.register_buffer("offsets", torch.zeros(num_items + 1, dtype=torch.int64))
        self.register_buffer("targets", torch.zeros(num_transitions, dtype=torch.int64))
        self.register_buffer("chances", torch.zeros(num_transitions))
        if self.num_attributes:
            self.arguments |= {"num_attributes": self.num_attributes, "num_links": self.num_links, "harmonic": harmonic}
            self.register_buffer("attribute_offsets", torch.zeros(num_items + 1, dtype=torch.int64))
            self.register_buffer("attribute_links", torch.zeros(num_links, dtype=torch.int64))
            self.register_buffer("attribute_weights", torch.zeros(num_attributes))
            self.register_buffer("pull", torch.zeros(num_items))
            self.register_buffer("backoff", torch.zeros(()))

    @classmethod
    def fit(
        cls,
        histories: Sequence[ArrayLike] | np.ndarray,
        num_items: int,
        noise_multiplier: float,
        *,
        ledger: Ledger,
        offsets: np.ndarray | None = None,
        attributes: Attributes | None = None,
        seed: int | None = None,
    ) -> TransitionCounts:
        """Release the counts of all histories and make a model of them.

        Args:
            histories: one row of items per user, in order of time; or, with `offsets`, all items in one array.
            num_items: size of the public catalogue.
            noise_multiplier: σ of the one Gaussian event that covers everything: `calibrate(epsilon, delta, 1.0, 1)`.
            ledger: the ledger that records the event.
            offsets: (users + 1,) with the items of user u at histories[offsets[u]:offsets[u + 1]].
            attributes: public facts about the items.
            seed: for tests only: marks the event as not private.
        """
        if offsets is None:
            rows = [np.asarray(history) for history in histories]
            offsets = np.cumsum([0, *map(len, rows)])
            histories = np.concatenate([row for row in rows if len(row)] or [np.zeros(0, np.int64)])
        release = release_transitions(
            np.asarray(histories),
            offsets,
            num_items,
            noise_multiplier,
            near=None if attributes is None else near_pairs(attributes),
            seed=seed,
        )
        assert release.event is not None
        ledger.add(release.event)
        return cls.from_release(release, attributes)

    @classmethod
    def from_release(
        cls, release: TransitionRelease, attributes: Attributes | None = None, *, repeat_weight: float = 0.0
    ) -> TransitionCounts:
        """The model of a release: post-processing. Uninformative attributes are dropped.

        Without evidence for attributes in the release, they are taken to say as much as most do.

        Args:
            release: the release.
            attributes: public facts about the items.
            repeat_weight: ρ.
        """
        release = combined(release)
        num_items = len(release.frequencies.p)
        known = None if attributes is None else fit_backoff(release, attributes)
        thresholds = with_walks(PLAIN_THRESHOLD if known is None else known.thresholds, release)
        rows, targets, chances = _chances(release, thresholds, 0.0 if known is None else known.evenness)
        row_sums = np.bincount(rows, weights=chances, minlength=num_items)  # of T without repeats
        if repeat_weight:
            rows, targets, chances = _with_repeats(rows, targets, chances, num_items, repeat_weight)
        if known is None:
            model = cls(num_items, len(rows))
        else:
            model = cls(num_items, len(rows), len(known.attributes), len(known.attributes.links), known.strong)
            model.attribute_names = list(known.attributes.names)
            model.attribute_offsets.copy_(torch.from_numpy(known.attributes.offsets))
            model.attribute_links.copy_(torch.from_numpy(known.attributes.links))
            model.attribute_weights.copy_(torch.from_numpy(known.weights))
            model.pull.copy_(torch.from_numpy(known.pull))
            model.backoff.fill_(known.share(row_sums))
        model.popularity.copy_(torch.from_numpy(release.frequencies.p / release.frequencies.p.sum()))
        model.offsets.copy_(torch.from_numpy(np.searchsorted(rows, np.arange(num_items + 1))))
        model.targets.copy_(torch.from_numpy(targets))
        model.chances.copy_(torch.from_numpy(chances))
        return model.eval()

    @classmethod
    def from_public(cls, attributes: Attributes) -> TransitionCounts:
        """The model of public attributes alone, every item as popular as any other: what costs no privacy at all."""
        return cls.from_release(nothing_released(attributes.num_items), attributes)

    def check_state(self) -> None:
        """Raise if a loaded state has indices out of range."""
        rising = bool((self.offsets.diff() >= 0).all())
        if not rising or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != self.num_transitions:
            raise ValueError("offsets do not cut the transitions into rows")
        if self.num_transitions and not 0 <= int(self.targets.min()) <= int(self.targets.max()) < self.num_items:
            raise ValueError(f"a transition points outside the items 0 … {self.num_items - 1}")
        if self.num_attributes:
            self._check_attributes()

    def _check_attributes(self) -> None:
        rising = bool((self.attribute_offsets.diff() >= 0).all())
        if not rising or int(self.attribute_offsets[0]) != 0 or int(self.attribute_offsets[-1]) != self.num_links:
            raise ValueError("attribute_offsets do not cut the links into items")
        links = self.attribute_links
        if self.num_links and not 0 <= int(links.min()) <= int(links.max()) < self.num_attributes:
            raise ValueError(f"a link points outside the attributes 0 … {self.num_attributes - 1}")
        if not bool((self.attribute_weights > 0).all() and (self.pull > 0).all()):
            raise ValueError("a weight of attributes is not positive")
        if not 0 <= float(self.backoff) <= 1:
            raise ValueError(f"backoff is {float(self.backoff):g}, not between 0 and 1")

    def scores(self, histories: Sequence[ArrayLike]) -> Tensor:
        """(B, M) scores of every item after each history, for ranking; popularity's after an empty one."""
        latest = torch.from_numpy(latest_items(histories, self.num_items)).to(self.popularity.device)
        return self._claims(latest).add_(self.popularity, alpha=HINT).log_()

    def explain(self, history: ArrayLike, item: int) -> Explanation:
        """Why an item has its score after a history: parts that add up to it."""
        return explain(self, history, item, HINT)

    @property
    def max_length(self) -> int:
        """The number of last items of a history that matter."""
        return LATEST

    def next_scores(self, items: Tensor, lengths: Tensor) -> Tensor:
        """`scores` of plain tensors without branches, for export.

        Args:
            items: (B, L) int64, right-padded with 0, L at most `max_length`.
            lengths: (B,) int64.
        """
        back = lengths[:, None] - 1 - torch.arange(items.shape[1], device=items.device)  # 0 for the latest
        weights = weights_of(back, back >= 0, self.harmonic)  # α
        nothing = torch.zeros_like(weights[:, :1]) * self.popularity  # (B, M)
        claims = sum_of_rows(items, weights, self.offsets, self.targets, self.chances, nothing)
        if self.num_attributes:
            offsets, links = self.attribute_offsets, self.attribute_links
            none = torch.zeros_like(weights[:, :1]) * self.attribute_weights  # (B, G)
            interest = sum_of_rows(items, weights, offsets, links, self._reach(), none)
            claims = claims + self.backoff * product_with_columns(interest, offsets, links, self._pulled())
        return (claims + HINT * self.popularity).log()

    def _claims(self, latest: Tensor) -> Tensor:
        """c (R, M) after each row of (R, LATEST) items, latest first, padded with -1."""
        weights = weights_of(torch.arange(LATEST, device=latest.device), latest >= 0, self.harmonic)  # α
        claims = self.popularity.new_zeros(len(latest), self.num_items)
        add_rows(claims, latest, weights, self.offsets, self.targets, self.chances)
        if self.num_attributes:
            claims += self.backoff * self._offered(self._interest(latest, weights))
        return claims

    # The back-off: K = R P, through the attributes.

    def _interest(self, latest: Tensor, weights: Tensor) -> Tensor:
        """(R, G): Σ_k α_k R_{x_k g}."""
        interest = self.popularity.new_zeros(len(latest), self.num_attributes)
        add_rows(interest, latest, weights, self.attribute_offsets, self.attribute_links, self._reach())
        return interest

    def _offered(self, interest: Tensor) -> Tensor:
        """(R, M): Σ_g interest_g P_gb."""
        values = self._pulled()
        bag = F.embedding_bag(
            self.attribute_links,
            interest.T.contiguous(),  # (G, R)
            self.attribute_offsets,
            mode="sum",
            per_sample_weights=values,
            include_last_offset=True,
        )
        return bag.T

    def backoff_factors(self) -> tuple[csr_array, csr_array]:
        """R (M, G) and μP (G, M) as sparse float32 matrices; without attributes they are empty."""
        from scipy.sparse import csr_array

        if not self.num_attributes:
            shape = (self.num_items, 0)
            return csr_array(shape, dtype=np.float32), csr_array(shape[::-1], dtype=np.float32)
        links, offsets = self.attribute_links.cpu().numpy(), self.attribute_offsets.cpu().numpy()
        shape = (self.num_items, self.num_attributes)
        reach = csr_array((self._reach().cpu().numpy(), links, offsets), shape=shape)
        offered = csr_array(((self.backoff * self._pulled()).cpu().numpy(), links, offsets), shape=shape)
        return reach, offered.T.tocsr()

    def _reach(self) -> Tensor:
        """R_ag of each link (n,): the weight of an attribute relative to the others of its item."""
        weights, origins = self.attribute_weights[self.attribute_links], row_of(self.attribute_offsets)
        sums = self.popularity.new_zeros(self.num_items).scatter_add(0, origins, weights)
        return weights / sums[origins]

    def _pulled(self) -> Tensor:
        """P_gb of each link (n,): the pull of an item relative to the others with the attribute."""
        pull = self.pull[row_of(self.attribute_offsets)]
        sums = self.popularity.new_zeros(self.num_attributes).scatter_add(0, self.attribute_links, pull)
        return pull / sums[self.attribute_links]


def _chances(
    release: TransitionRelease, thresholds: np.ndarray, evenness: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The non-zero entries of T by rows: (from (K,), to (K,), probability (K,) float64), evened out within rows."""
    both = _directed(release, thresholds)
    there = [np.flatnonzero(each > 0) for each in both]  # most pairs are noise and vanish
    ways = [release.items[release.pairs[chosen]] for chosen in there]  # (pairs, 2) of a → b, and of b → a
    rows = np.concatenate([ways[0][:, 0], ways[1][:, 1]])
    targets = np.concatenate([ways[0][:, 1], ways[1][:, 0]])
    order = np.lexsort((targets, rows))
    counts = np.concatenate([each[chosen] for each, chosen in zip(both, there, strict=True)])[order]
    rows, targets = rows[order], targets[order]
    sums = np.bincount(rows, weights=counts, minlength=1)
    if evenness == 0:
        return rows, targets, counts / (sums[rows] + ROW_PRIOR)
    led_to = np.bincount(targets, weights=counts, minlength=1)
    shares = counts ** (1 - evenness) * (led_to[targets] + ROW_PRIOR) ** -evenness
    trusted = sums / ((sums + ROW_PRIOR) * np.maximum(np.bincount(rows, weights=shares, minlength=1), 1e-300))
    return rows, targets, shares * trusted[rows]


def _with_repeats(
    rows: np.ndarray, targets: np.ndarray, chances: np.ndarray, num_items: int, weight: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """T + ρI, in the same order."""
    every = np.arange(num_items)
    rows, targets = np.concatenate([rows, every]), np.concatenate([targets, every])
    order = np.lexsort((targets, rows))
    return rows[order], targets[order], np.concatenate([chances, np.full(num_items, weight)])[order]


def _directed(release: TransitionRelease, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C_ab and C_ba of each pair, by the rules at the top of this file."""
    total = np.maximum(release.total - thresholds * release.total_deviation, 0) * confirmation(release)
    noise = release.difference_deviation**2
    clear = release.total > CLEAR * release.total_deviation
    order = (release.difference[clear] ** 2 - noise).sum()
    strength = (release.total[clear] ** 2 - release.total_deviation**2).sum()
    eta2 = max(order / strength, 0.0) if clear.any() else 0.0
    prior = eta2 * total**2
    kept = prior / np.maximum(prior + noise, 1e-300)  # without noise and order there is nothing to keep
    difference = np.clip(release.difference * kept, -total, total)
    return (total + difference) / 2, (total - difference) / 2
