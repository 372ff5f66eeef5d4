r"""Back-off to public attributes: which attributes matter, and how much, estimated from a released count table.

Items without any released transitions share attributes with items that have some. With A the item × attribute matrix
(attributes and pairs of them: comedies of 1995 too), q popularity (`posterior_means` of the released counts, summing to
1) and Q_g = Σ_b A_bg q_b,

    K_ab = Σ_g R_ag P_gb,   R_ag ∝ A_ag w_g  (rows sum to 1),   P_gb ∝ A_bg q_b^0.6/√d_b  (rows sum to 1)

is the probability that b follows a because it shares an attribute g of a. An item with many attributes is reachable
through many of them, so its pull is divided by the root of their number d_b (those with w_g > 0). How far to trust K is
decided from the release itself, by fixed rules, so it costs no privacy:

- *Lift.* Over the pairs {a, b} released above their threshold, with counts S_ab: the part s_g of Σ S_ab on pairs that
share g, divided by the part e_g expected if partners were drawn at random (from the same margins). Shrunk towards the
lift L of the whole column (category, brand, title …) by 3 counts: l_g = (s_g + 3·min(L, 3)) / (e_g + 3).
- *Trust.* Attributes unrelated to users' actions have L ≈ 1. The random variation sd of L is measured by dealing the
attributes to other items, eight times. With k = 1/(1 + (sd/0.2)⁴), near 1 with many counts, a column is trusted by
γ = clip((k·(L − 1 − 3·sd) + (1 − k)·0.5)/0.1, 0, 1), and l_g is shrunk towards k·L + (1 − k)·3 instead of L: without
counts all attributes weigh by how rare they are, which is what is public.
- *Strength.* s, how much attributes say about users, is released before (`queries/transitions/attribute_evidence.py`).
- *Weights.* w_g = γ·(max(l_g − 1, 0)/√Q_g)^0.75·(1 − Σ_b P_gb²). The last factor is the probability that two draws from
P_g differ: an attribute that is mostly one item says little about others. Attributes with w_g = 0 are dropped; if none
remains, the model is exactly the counts alone.
- *Thresholds.* A pair that shares attributes is more likely to be real: its total loses 1.75 − ¼·ln(max(r, 0.1))
  standard deviations of noise instead of 1.5, r² = (K_ab/q_b)(K_ba/q_a).
- *Evenness.* Within a row of T, large counts weigh slightly less, as do items that many others lead to: with
e = 0.1·γ·s the probabilities are proportional to C_ab^(1 − e)·(Σ_a C_ab + 30)^−e, and the row keeps its sum.
- *Share.* μ = 0.4·γ·s·(1 − B)², B = Σ_a q_a Σ_b T_ab the share that the counts claim already; the model's claims
  are T + μK.

The constants were chosen on validation items; see docs/results/attributes.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpformer.data.attributes import Attributes
from dpformer.models.confirmed import confirmation
from dpformer.models.shrinkage import posterior_means

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from dpformer.queries.transitions.rounds import TransitionRelease

PLAIN_THRESHOLD = 1.5  # standard deviations subtracted from every total if attributes are uninformative
THRESHOLD, SLOPE, LEAST_LIFT = 1.75, 0.25, 0.1
HIGHEST_THRESHOLD = 4.0
POPULARITY_POWER = 0.6
WEIGHT_POWER = 0.75
EVENNESS = 0.1
PSEUDO_COUNTS, HIGHEST_PRIOR_LIFT = 3.0, 3.0
DEALS, DEVIATIONS, CERTAIN = 8, 3.0, 0.1
NO_COUNTS = 1e9  # variation of L without counts
UNSURE, USUAL = 0.2, 0.5  # variation of L at which it counts half, and the excess lift that stands in for it
SHARE = 0.4
LEAST_OTHERS = 1e-6  # rounding must not make a weight vanish


@dataclass(frozen=True)
class BackOff:
    """The informative attributes, and how they are used."""

    attributes: Attributes  # G of them, w_g > 0
    weights: np.ndarray  # (G,) float64: w
    pull: np.ndarray  # (M,) float64: q^0.6/√d
    trust: float  # γ of the best column
    popularity: np.ndarray  # (M,) float64: q
    thresholds: np.ndarray  # (K,) float64: standard deviations subtracted from each released pair

    strength: float  # s, how much attributes say according to the released evidence
    strong: bool  # whether that is much

    @property
    def evenness(self) -> float:
        """e, by how much rows of T are evened out."""
        return EVENNESS * self.trust * self.strength

    def share(self, row_sums: np.ndarray) -> float:
        """μ, given Σ_b T_ab of every item a."""
        return SHARE * self.trust * self.strength * max(0.0, 1 - float(self.popularity @ row_sums)) ** 2


def fit_backoff(release: TransitionRelease, attributes: Attributes) -> BackOff | None:
    """The attributes that the release shows to be informative; None if there are none."""
    frequencies = release.frequencies
    if attributes.num_items != len(frequencies.p):
        raise ValueError(f"attributes of {attributes.num_items} items for {len(frequencies.p)} items")
    q = posterior_means(frequencies.counts, frequencies.noise_multiplier)
    q = q / q.sum()
    pairs = release.items[release.pairs]  # (K, 2)
    totals = np.maximum(release.total - PLAIN_THRESHOLD * release.total_deviation, 0) * confirmation(release)
    seen = np.flatnonzero(totals > 0)
    evidence = release.evidence
    strength, strong = (1.0, True) if evidence is None else (evidence.strength, evidence.strong)
    if not strength or not len(attributes):
        return None
    attributes = attributes.with_pairs()
    lifts, trust = _lifts(matrix(attributes), attributes, release.items, pairs[seen], totals[seen])
    shares = np.bincount(attributes.links, weights=q[attributes.origins], minlength=len(attributes))
    weights = trust * (np.maximum(lifts - 1, 0) / np.sqrt(np.maximum(shares, 1e-12))) ** WEIGHT_POWER
    useful = weights > 0
    if not useful.any():
        return None
    chosen = attributes.kept(useful)
    pull = q**POPULARITY_POWER / np.sqrt(np.maximum(np.diff(chosen.offsets), 1))
    weights = weights[useful] * _others(chosen, pull)
    found = BackOff(chosen, weights, pull, float(trust[useful].max()), q, totals, strength, strong)
    return BackOff(**{**vars(found), "thresholds": _thresholds(found, pairs)})


def _others(attributes: Attributes, pull: np.ndarray) -> np.ndarray:
    """1 − Σ_b P_gb² (G,): the probability that two draws from attribute g differ. Each has at least two items."""
    pulled = pull[attributes.origins]
    sums = np.bincount(attributes.links, weights=pulled, minlength=len(attributes))
    same = np.bincount(attributes.links, weights=(pulled / sums[attributes.links]) ** 2, minlength=len(attributes))
    return np.maximum(1 - same, LEAST_OTHERS)


def matrix(attributes: Attributes) -> csr_matrix:
    """A (M, G)."""
    from scipy.sparse import csr_matrix

    links = attributes.links
    return csr_matrix((np.ones(len(links)), links, attributes.offsets), (attributes.num_items, len(attributes)))


def _lifts(
    table: csr_matrix, attributes: Attributes, head: np.ndarray, pairs: np.ndarray, totals: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(l_g, γ of g's column), both (G,)."""
    names = [column for column, _ in attributes.names]
    columns, column_of = np.unique(names, return_inverse=True)

    def by_column(values: np.ndarray) -> np.ndarray:
        return np.bincount(column_of, weights=values, minlength=len(columns))

    def lift(shared: np.ndarray, chance: np.ndarray) -> np.ndarray:
        return by_column(shared) / np.maximum(by_column(chance), 1e-12)

    shared, chance = _shared(table, pairs, totals)
    column_lift = lift(shared, chance)
    random, places = np.random.default_rng(0), np.arange(table.shape[0])
    dealt = []
    for _ in range(DEALS):
        places[head] = random.permutation(head)
        dealt.append(lift(*_shared(table[places], pairs, totals)))
    luck = np.sqrt(np.mean((np.array(dealt) - 1) ** 2, axis=0))
    luck[by_column(chance) == 0] = NO_COUNTS
    known = 1 / (1 + (luck / UNSURE) ** 4)  # near 1 with many counts
    trust = np.clip((known * (column_lift - 1 - DEVIATIONS * luck) + (1 - known) * USUAL) / CERTAIN, 0, 1)
    expected = known * column_lift + (1 - known) * HIGHEST_PRIOR_LIFT
    prior = PSEUDO_COUNTS * np.minimum(expected, HIGHEST_PRIOR_LIFT)
    return (shared + prior[column_of]) / (chance + PSEUDO_COUNTS), trust[column_of]


def _shared(table: csr_matrix, pairs: np.ndarray, totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s_g, e_g): counts on pairs that share g, and their expectation by chance, where no item follows itself."""
    shared = table[pairs[:, 0]].multiply(table[pairs[:, 1]]).T @ totals
    margin = np.bincount(pairs.ravel(), weights=np.repeat(totals, 2), minlength=table.shape[0])
    margin = margin / max(margin.sum(), 1e-300)
    alone = margin**2
    chance = ((table.T @ margin) ** 2 - table.T @ alone) / max(1 - alone.sum(), 1e-12)
    return np.asarray(shared).ravel(), np.maximum(chance * totals.sum(), 0)


def _thresholds(found: BackOff, pairs: np.ndarray) -> np.ndarray:
    from scipy.sparse import diags

    table = matrix(found.attributes)
    reach = table @ diags(found.weights)
    reach = (diags(1 / np.maximum(np.asarray(reach.sum(1)).ravel(), 1e-12)) @ reach).tocsr()  # R
    pulled = diags(found.pull) @ table
    pulled = (pulled @ diags(1 / np.maximum(np.asarray(pulled.sum(0)).ravel(), 1e-12))).tocsr()  # Pᵀ
    a, b = pairs.T
    forward = np.asarray(reach[a].multiply(pulled[b]).sum(1)).ravel() / found.popularity[b]
    backward = np.asarray(reach[b].multiply(pulled[a]).sum(1)).ravel() / found.popularity[a]
    likelier = np.sqrt(np.maximum(forward * backward, 0))
    informed = np.clip(THRESHOLD - SLOPE * np.log(np.maximum(likelier, LEAST_LIFT)), 0, HIGHEST_THRESHOLD)
    return PLAIN_THRESHOLD + found.trust * (informed - PLAIN_THRESHOLD)
