r"""Transition counts released with differential privacy: from items to unordered pairs to directed pairs, in rounds.

Counting all M² transitions in one release spends nearly all of every user's contribution on cells that drown in noise.
So the budget is split into rounds, each a Gaussian release of sensitivity 1, and every round considers only cells
where previous rounds found something; a user's vector is scaled to norm 1 *over the cells still in play*, so none of it
is spent on cells that have been dropped:

    items       how popular each item is (`release_frequencies`); those above 3 standard deviations are the m selected
    items.
                With public attributes (which also recommend all others) that say much, and short histories: twice
                (`AGAIN`).
                Without a public catalogue: `release_items`, which releases only items above its threshold
    evidence    with public attributes: how much they say (`attribute_evidence.py`), with 0.2 to 3% of the budget
    unordered   Σ_u v_u/‖v_u‖ over the m(m−1)/2 pairs {a, b}: both directions share one cell
    directed    the same over (a, b) and (b, a) of the pairs that survived

After each round a pair survives if its estimate S is more than `keep` standard deviations above zero. Rounds are
weighted by 1/σ_r²; with a directed round's (x_ab, x_ba) ~ N(θ, σ_r²) the sum x_ab + x_ba counts for S with variance
2σ_r².

**Budget.** Round r has share s_r of the budget, σ_r = σ/√s_r and Σ s_r = 1. Each round is a Gaussian mechanism of
sensitivity 1 whose cells are chosen by *released* numbers only, and adaptive composition of Gaussian mechanisms is
exact: √Σ 1/σ_r² = 1/σ (Dong, Roth, Su 2022, Corollary 3.3). So all rounds together cost no more than **one Gaussian
event of noise multiplier σ**. docs/maths/counts.md has the full argument and what each choice gains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from dpformer.accounting.arguments import positive, whole
from dpformer.accounting.events import Gaussian
from dpformer.engines.sums import GRID, ArraySums, Sums, gathered
from dpformer.noise.randomness import SecureRandom, public_grid
from dpformer.noise.sparse import noisy_above
from dpformer.progress import reach, stage
from dpformer.queries.frequencies import FrequencyRelease, exact_sums, mean_of, of_items, release_sums
from dpformer.queries.items import release_item_sums
from dpformer.queries.transitions.attribute_evidence import (
    AttributeEvidence,
    evidence_share,
    exact_evidence,
    release_evidence,
)
from dpformer.queries.transitions.prior import Prior

LABEL = "transition counts"
MOST_NOISE = 2**25  # expected number of cells without data that pass the first round: bounds memory
AT_ONCE = 2**22  # numbers processed together
MOST_KEPT = 2**20  # maximum number of pairs in a round whose noisy counts are stored for `verify`
SLACK = 1 + 1e-9  # on every standard deviation, so that the event never claims more noise than was added


class Round(NamedTuple):
    share: float  # share of the budget, in 1/σ²
    directed: bool
    keep: float  # standard deviations above zero that a pair needs to stay


ITEMS = Round(0.05, False, 3.0)
LIST = 0.2  # share of the round of items if it also releases the list; the other rounds share the rest
AGAIN = ITEMS.share  # share of a second release of popularity, if attributes say much and histories are short
LONG = 5.0  # mean √length above which histories are not short
ROUNDS = (
    Round(0.2375, False, 1.0),
    Round(0.1425, False, 1.0),
    Round(0.1425, False, 1.5),
    Round(0.1425, True, 1.5),
    Round(0.1425, True, 1.5),
    Round(0.1425, True, -math.inf),
)


@dataclass(frozen=True)
class RoundRelease:
    """Noisy counts of one round as released: of all pairs in play or, in the first round, of those that passed.

    They allow anyone with the data to count again and check the noise (`verify`).
    """

    number: int  # index in ROUNDS
    cells: np.ndarray  # (K,) int64 ascending: unordered
    noisy: np.ndarray  # (K,) float64, or (2K,) directed

    def copy(self) -> "RoundRelease":
        return RoundRelease(self.number, self.cells.copy(), self.noisy.copy())


@dataclass(frozen=True)
class TransitionRelease:
    """The release: estimates of how often the items of a pair {a, b}, a before b in `items`, follow one another."""

    items: np.ndarray  # (m,) int64 ascending: the selected items
    pairs: np.ndarray  # (K, 2) int64: indices in `items`, a < b
    total: np.ndarray  # (K,) float64: S, sum of both directions
    total_deviation: float
    difference: np.ndarray  # (K,) float64: (a, b) minus (b, a)
    difference_deviation: float
    frequencies: FrequencyRelease
    event: Gaussian | None  # the whole release including the frequencies, for the ledger. None: exact, not private
    item_list: np.ndarray | None = (
        None  # (M,) int64: the former number of released item 0, 1, …; None: all, a public list
    )
    rounds: tuple[RoundRelease, ...] = ()  # rounds with at most MOST_KEPT pairs
    again: np.ndarray | None = None  # (M,) float64: second release of popularity; `frequencies` is the mean of both
    evidence: AttributeEvidence | None = None  # None: items have no public attributes
    prior: Prior | None = None  # counts released by an earlier run, for `combined`


class Estimate:
    """Pairs in play and their estimates so far, with each round weighted by 1/σ_r².

    It takes ownership of its arrays: they may have tens of millions of entries, so everything is done in place.
    """

    def __init__(self, cells: np.ndarray, sums: np.ndarray, deviation: float) -> None:
        self.cells = cells  # (K,) int64 ascending: unordered
        self.sums, self.precision = sums, deviation**-2  # of unordered rounds
        self.sums /= deviation**2
        self.directed, self.directed_precision = np.zeros((0, 2)), 0.0  # (K, 2) from the first directed round

    @property
    def total_deviation(self) -> float:
        return (self.precision + self.directed_precision / 2) ** -0.5

    def total(self, part: slice = slice(None)) -> np.ndarray:
        directed = self.directed[part].sum(1) / 2 if self.directed_precision else 0.0
        return np.asarray((self.sums[part] + directed) * self.total_deviation**2)

    def difference(self) -> np.ndarray:
        return np.asarray(self.directed[:, 0] - self.directed[:, 1]) / self.directed_precision

    def keep(self, deviations: float) -> None:
        least, kept = deviations * self.total_deviation, 0
        for start in range(0, len(self.cells), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            stay = np.flatnonzero(self.total(part) > least)
            to = slice(kept, kept := kept + len(stay))
            self.cells[to], self.sums[to] = self.cells[part][stay], self.sums[part][stay]
            if self.directed_precision:
                self.directed[to] = self.directed[part][stay]
        if kept < len(self.cells):
            self.cells = self.cells[:kept].copy()  # one after another, so that each frees the longer array
            self.sums = self.sums[:kept].copy()
            self.directed = self.directed[:kept].copy()

    def add(self, noisy: np.ndarray, deviation: float, directed: bool) -> None:
        if directed and not self.directed_precision:
            self.directed = np.zeros((len(self.cells), 2))
        added = noisy.reshape(-1, 2) if directed else noisy
        to = self.directed if directed else self.sums
        for start in range(0, len(to), AT_ONCE):
            to[start : start + AT_ONCE] += added[start : start + AT_ONCE] / deviation**2
        if directed:
            self.directed_precision += deviation**-2
        else:
            self.precision += deviation**-2


def release_transitions(
    items: np.ndarray,
    offsets: np.ndarray,
    num_items: int,
    noise_multiplier: float,
    *,
    delta: float = 0.0,
    near: np.ndarray | None = None,
    random: SecureRandom | None = None,
    seed: int | None = None,
) -> TransitionRelease:
    """Release transition counts of all users' histories, under one Gaussian event.

    The number of users is assumed public, as is the catalogue 0..num_items-1 without `delta`.

    Args:
        items: (n,) integers, user u's at items[offsets[u]:offsets[u + 1]], in order of time.
        offsets: (users + 1,).
        num_items: size of the catalogue.
        noise_multiplier: σ of the event that covers the whole release.
        delta: release the item list too, with this failure probability: only items of many users are in the release,
            renumbered, and others do not exist in it.
        near: the pairs of items that share a rare public attribute (`near_pairs`), if items have attributes: how much
            these say is released, and if it is much and histories are short, popularity is released twice.
        random: random numbers for this release only, since they determine the noise; by default from a new key.
        seed: for tests only: marks the event as not private.
    """
    sums = ArraySums.packed(items, offsets)
    return release_transition_sums(sums, num_items, noise_multiplier, delta=delta, near=near, random=random, seed=seed)


def release_transition_sums(
    sums: Sums,
    num_items: int,
    noise_multiplier: float,
    *,
    delta: float = 0.0,
    near: np.ndarray | None = None,
    random: SecureRandom | None = None,
    seed: int | None = None,
) -> TransitionRelease:
    """The same for histories stored anywhere: `sums` gives a round's exact sums; all privacy is handled here."""
    num_items, noise_multiplier = whole("num_items", num_items, 1), positive("noise_multiplier", noise_multiplier)
    random = random or SecureRandom(LABEL, seed=seed)
    with stage("adding up counts", (1 + len(ROUNDS)) * sums.num_users):
        return _rounds(sums, num_items, noise_multiplier, delta, near, random)


def _rounds(
    sums: Sums, num_items: int, noise_multiplier: float, delta: float, near: np.ndarray | None, random: SecureRandom
) -> TransitionRelease:
    counted = sums.items(num_items) / GRID
    items, again, evidence = round_of_items(listed=bool(delta), again=False), None, None
    if delta:
        deviation = deviation_of(items, noise_multiplier)
        found = release_item_sums(counted, deviation, delta=delta, random=random.within("items"))
        item_list, frequencies = found.items, of_items(found, sums.num_users)
        head = np.arange(len(item_list))
    else:
        item_list = None
        evidence = None if near is None else _evidence(sums, near, num_items, noise_multiplier, random)
        described = evidence is not None and evidence.strong
        frequencies, again = _popularity(counted, sums.num_users, noise_multiplier, described, random)
        items = round_of_items(listed=False, again=again is not None)
        head = np.flatnonzero(frequencies.counts > items.keep * frequencies.noise_multiplier)
    rest = noise_of_pairs(items, noise_multiplier, evidence_of=None if evidence is None else sums.num_users)
    places = np.full(num_items, -1)
    places[head if item_list is None else item_list] = np.arange(len(head))
    reach(sums.num_users)
    first = _first_round(sums, places, len(head), rest, random)
    rounds = [first.copy()] if len(first.cells) <= MOST_KEPT else []
    estimate = Estimate(first.cells, first.noisy, deviation_of(ROUNDS[0], rest))
    del first  # tens of millions of cells if there are many items
    for number, this in enumerate(ROUNDS[1:], start=1):
        reach((1 + number) * sums.num_users)
        deviation = deviation_of(this, rest)
        noisy = _noisy(sums.pairs(places, estimate.cells, this.directed), deviation, random, number)
        if len(estimate.cells) <= MOST_KEPT:
            rounds.append(RoundRelease(number, estimate.cells.copy(), noisy))
        estimate.add(noisy, deviation, this.directed)
        del noisy
        estimate.keep(this.keep)
    event = Gaussian(noise_multiplier, label=LABEL, delta=delta, private=random.private)
    estimated = _released(estimate, head, frequencies, event, item_list)
    return replace(estimated, rounds=tuple(rounds), again=again, evidence=evidence)


def exact_transition_sums(sums: Sums, num_items: int, near: np.ndarray | None = None) -> TransitionRelease:
    """The same counts without noise and without an event, to measure the cost of privacy. Not private.

    All items are selected, and every pair that occurs; there are no rounds.
    """
    everything = np.arange(whole("num_items", num_items, 1))
    cells = gathered(sums.all_pairs(everything))[0]
    directed = sums.pairs(everything, cells, True).reshape(-1, 2) / GRID
    return TransitionRelease(
        items=everything,
        pairs=_pairs_of(cells),
        total=directed.sum(1),
        total_deviation=0.0,
        difference=directed[:, 0] - directed[:, 1],
        difference_deviation=0.0,
        frequencies=exact_sums(sums.items(num_items) / GRID, sums.num_users),
        event=None,
        evidence=None if near is None else exact_evidence(sums, near, num_items),
    )


def nothing_released(num_items: int) -> TransitionRelease:
    """The release that knows no user: all items are equally popular, and there are no pairs."""
    none = np.zeros(0)
    return TransitionRelease(
        items=np.zeros(0, np.int64),
        pairs=np.zeros((0, 2), np.int64),
        total=none,
        total_deviation=0.0,
        difference=none,
        difference_deviation=0.0,
        frequencies=exact_sums(np.ones(num_items), num_items),
        event=None,
    )


def deviation_of(this: Round, noise_multiplier: float) -> float:
    """σ_r = σ/√s_r, with a tiny margin."""
    return noise_multiplier / math.sqrt(this.share) * SLACK


def round_of_items(*, listed: bool, again: bool) -> Round:
    """The first round, depending on whether it also releases the item list, or popularity twice."""
    return ITEMS._replace(share=LIST if listed else ITEMS.share + again * AGAIN)


def again_wanted(first: np.ndarray, num_users: int) -> bool:
    """Whether popularity is released again: a function of its first release and the public number of users.

    Σ_i popularity / users is the mean √length of a history. If histories are long, additional items that become visible
    would only take from what users contribute to the others.
    """
    return float(first.sum()) <= LONG * num_users


def _popularity(
    counted: np.ndarray, num_users: int, noise_multiplier: float, described: bool, random: SecureRandom
) -> tuple[FrequencyRelease, np.ndarray | None]:
    """Popularity from one release or two, and the second one separately.

    `described` is whether attributes say much. The cost of the second is subtracted from the rounds of pairs
    (`noise_of_pairs`): in both cases the first release costs the same and everything after it costs the same, so
    the total is that of one event.
    """
    once = release_sums(counted, num_users, deviation_of(ITEMS, noise_multiplier), random=random.within("items"))
    if not described or not again_wanted(once.counts, num_users):
        return once, None
    twice = release_sums(counted, num_users, once.noise_multiplier, random=random.within("items again"))
    return mean_of(once, twice), twice.counts


def _evidence(
    sums: Sums, near: np.ndarray, num_items: int, noise_multiplier: float, random: SecureRandom
) -> AttributeEvidence:
    deviation = deviation_of_evidence(sums.num_users, noise_multiplier)
    return release_evidence(sums, near, num_items, deviation, random.within("attributes"))


def deviation_of_evidence(num_users: int, noise_multiplier: float) -> float:
    """σ_e, from public numbers."""
    return noise_multiplier / math.sqrt(evidence_share(num_users, noise_multiplier)) * SLACK


def noise_of_pairs(items: Round, noise_multiplier: float, *, evidence_of: int | None = None) -> float:
    """σ for the rounds of pairs, whose shares refer to what the earlier releases leave; usually σ itself.

    `evidence_of` is the number of users if the evidence for attributes was released, otherwise None.
    """
    spent = items.share + (0.0 if evidence_of is None else evidence_share(evidence_of, noise_multiplier))
    return noise_multiplier * math.sqrt((1 - ITEMS.share) / (1 - spent))


def final_deviations(
    noise_multiplier: float, *, listed: bool, again: bool, evidence_of: int | None = None
) -> tuple[float, float]:
    """Standard deviations of totals and differences after all rounds, which follow from σ and public numbers."""
    items = round_of_items(listed=listed, again=again)
    rest = noise_of_pairs(items, noise_multiplier, evidence_of=evidence_of)
    first = ROUNDS[0]
    estimate = Estimate(np.zeros(0, np.int64), np.zeros(0), deviation_of(first, rest))
    for this in ROUNDS[1:]:
        estimate.add(np.zeros(0), deviation_of(this, rest), this.directed)
    return estimate.total_deviation, math.sqrt(2 / estimate.directed_precision)


def _first_round(sums: Sums, places: np.ndarray, m: int, noise_multiplier: float, random: SecureRandom) -> RoundRelease:
    """All m(m−1)/2 unordered pairs; empty ones are not enumerated but drawn, and only those that survive."""
    this, num_cells = ROUNDS[0], m * (m - 1) // 2
    deviation = deviation_of(this, noise_multiplier)
    blocks = (
        (cells[start : start + AT_ONCE], counts[start : start + AT_ONCE] / GRID)
        for cells, counts in sums.all_pairs(places)
        for start in range(0, len(cells), AT_ONCE)
    )
    threshold = first_threshold(m) * deviation
    survivors = noisy_above(blocks, num_cells, deviation=deviation, threshold=threshold, random=random, step=0)
    return RoundRelease(0, *survivors)


def first_threshold(m: int) -> float:
    """Standard deviations that a pair needs in the first round: a function of the released number of items alone.

    Chosen to limit memory: about `MOST_NOISE` cells without data pass, regardless of the amount of data.
    """
    num_cells = m * (m - 1) // 2
    if num_cells * 0.5 <= MOST_NOISE:
        return ROUNDS[0].keep
    return max(ROUNDS[0].keep, -NormalDist().inv_cdf(MOST_NOISE / num_cells))


def retraced(rounds: Sequence[RoundRelease], noise_multiplier: float) -> Estimate | None:
    """The combined estimates of all rounds, by the rules of the release; None if one has the wrong pairs.

    Args:
        rounds: all rounds.
        noise_multiplier: σ of the rounds of pairs (`noise_of_pairs`).
    """
    first = rounds[0].copy()
    estimate = Estimate(first.cells, first.noisy, deviation_of(ROUNDS[0], noise_multiplier))
    for one in rounds[1:]:
        this = ROUNDS[one.number]
        if not np.array_equal(one.cells, estimate.cells):
            return None
        estimate.add(one.noisy, deviation_of(this, noise_multiplier), this.directed)
        estimate.keep(this.keep)
    return estimate


def _noisy(counts: np.ndarray, deviation: float, random: SecureRandom, step: int) -> np.ndarray:
    """Counts with noise, in the memory of the counts."""
    grid, noisy = public_grid(deviation), counts.view(np.float64)
    for start in range(0, len(counts), AT_ONCE):  # copies of tens of millions of entries would be slow
        part = slice(start, start + AT_ONCE)
        drawn = random.normal(len(counts[part]), step=step, start=start)
        noisy[part] = np.round((counts[part] / GRID + deviation * drawn) / grid) * grid
    return noisy


def _released(
    estimate: Estimate,
    head: np.ndarray,
    frequencies: FrequencyRelease,
    event: Gaussian,
    item_list: np.ndarray | None = None,
) -> TransitionRelease:
    return TransitionRelease(
        items=head,
        pairs=_pairs_of(estimate.cells),
        total=estimate.total(),
        total_deviation=estimate.total_deviation,
        difference=estimate.difference(),
        difference_deviation=math.sqrt(2 / estimate.directed_precision),
        frequencies=frequencies,
        event=event,
        item_list=item_list,
    )


def _pairs_of(cells: np.ndarray) -> np.ndarray:
    """(K, 2): the indices a < b of unordered cells b(b−1)/2 + a."""
    high = np.floor((1 + np.sqrt(1 + 8 * cells.astype(np.float64))) / 2).astype(np.int64)
    high -= high * (high - 1) // 2 > cells  # the root may round up
    high += high * (high + 1) // 2 <= cells  # or down
    return np.stack([cells - high * (high - 1) // 2, high], axis=1)
