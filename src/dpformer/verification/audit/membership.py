"""A membership attack on a released model, through what anybody may ask of it: recommendations, or generated text.

Canaries audit the mechanism and see every noisy sum. This attacks the *artefact* and sees what a customer sees: for
each candidate, a member whose data was trained on or a non-member of the same kind, prefixes of the history go in,
and how well the answers fit what the candidate really did next becomes a score. Above a threshold, the candidate is
accused.

    recommendations   mean over positions of ln(rank of the next item for nobody) − ln(rank of it after the prefix)
    generated text    share of the tokens after the prefix that the likeliest continuation gets right

With n non-members the threshold is their (k + 1)-th largest score, k = ⌊1 % of n⌋. The rate of false alarms is then,
for whatever distribution, below the quantile of Beta(k + 1, n − k); members found get a Clopper–Pearson interval.
Beside it stands what *no* attack can exceed there, from the privacy loss distribution of the ledger. A weak attack
shows nothing; one that finds more than the bound shows that the statement is wrong. It assumes that members are found
independently of one another, and that non-members are drawn as members are: people of another year are told apart
without any model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpformer.accounting.attack_rates import FALSE_ALARMS, attack_rates, attack_rates_of_search
from dpformer.accounting.events import Event
from dpformer.accounting.searches import Search
from dpformer.data import Dataset
from dpformer.errors import DpformerError
from dpformer.format_number import percent
from dpformer.runs.model_file import Release
from dpformer.verification.audit.bound import clopper_pearson
from dpformer.verification.audit.checks import ALARM

LEAST = 200  # non-members: with fewer, one in a hundred is not to be told from none
MOST = 2000  # candidates of each kind that are asked about
POSITIONS, LIST = 16, 200  # prefixes of a history, and recommendations asked for after each
CUTS, AHEAD = 4, 16  # prefixes of a text, and tokens generated after each
CONFIDENCE = 0.95
ASSUMES = "members are found independently of one another, and non-members are drawn as members are"
OWNER_ONLY = "An exact statistic of the data, which no ε covers: for the owner of the data alone, not to be published."


@dataclass(frozen=True)
class MembershipAttack:
    """What one attack found, beside what no attack may find."""

    members: int
    non_members: int
    accused_members: int
    accused_non_members: int
    found: float  # share of the members
    found_between: tuple[float, float]  # with CONFIDENCE
    false_alarms_at_most: float  # with CONFIDENCE
    bound: float  # on the share of members that any attack finds at that rate of false alarms
    passed: bool  # unless more than the bound are found, beyond a chance of `ALARM`

    @property
    def verdict(self) -> str:
        """One sentence."""
        low, high = self.found_between
        seen = (
            f"The attack finds {percent(self.found)} of the members ({percent(low)} to {percent(high)}) at no more "
            f"than {percent(self.false_alarms_at_most)} false alarms"
        )
        limit = f"by the statement no attack finds more than {percent(self.bound)} there"
        return f"{seen}; {limit}." if self.passed else f"FLAGGED: {seen}, and {limit}."

    def to_dict(self) -> dict[str, Any]:
        facts = {"verdict": self.verdict, **asdict(self), "confidence": CONFIDENCE}
        return {**facts, "assumes": ASSUMES, "covered": False, "note": OWNER_ONLY}


def attack_membership(
    release: Release,
    facts: Mapping[str, Any],
    members: Sequence[np.ndarray],
    non_members: Sequence[np.ndarray],
    *,
    text: bool = False,
    seed: int | None = None,
) -> MembershipAttack:
    """Attacks a released model.

    Args:
        release: the model, of which nothing but its answers is used.
        facts: its statement.
        members: what was trained on of each user, in items (or tokens) of the model.
        non_members: the same of users that were not in the data.
        text: whether to ask for text instead of recommendations.
        seed: of the choice of candidates, where there are more than `MOST`.
    """
    if len(non_members) < LEAST or len(members) < LEAST:
        raise DpformerError(
            f"there are {len(members):,} members and {len(non_members):,} non-members; to speak of one false alarm in "
            f"a hundred takes at least {LEAST} of each"
        )
    chance = np.random.default_rng(seed)
    score = _text_score(release) if text else _ranking_score(release)
    inside, outside = (np.array([score(one) for one in _some(kind, chance)]) for kind in (members, non_members))
    return _concluded(inside, outside, lambda alarms: _bound(facts, alarms))


def disjoint(members: Dataset, non_members: Dataset) -> None:
    """Refuses a user who is on both sides: an attack would be blamed for what it found."""
    if members.hash == non_members.hash:
        raise DpformerError("the non-members are the data of the run: name users that were not trained on")
    both = sorted({*members.user_ids} & {*non_members.user_ids} - {""})
    if both:
        raise DpformerError(f"user {both[0]!r} is among the members too: name users that were not trained on")


def _concluded(inside: np.ndarray, outside: np.ndarray, bound: Callable[[float], float]) -> MembershipAttack:
    from scipy.stats import beta

    allowed = int(FALSE_ALARMS * len(outside))
    threshold = np.sort(outside)[-allowed - 1]
    found, alarms = int((inside > threshold).sum()), int((outside > threshold).sum())

    def most_alarms(chance: float) -> float:
        return float(beta.ppf(1 - chance, allowed + 1, len(outside) - allowed))

    def least_found(chance: float) -> float:
        return 1 - clopper_pearson(len(inside) - found, len(inside), chance)

    each = (1 - CONFIDENCE) / 2
    return MembershipAttack(
        members=len(inside),
        non_members=len(outside),
        accused_members=found,
        accused_non_members=alarms,
        found=found / len(inside),
        found_between=(least_found(each), clopper_pearson(found, len(inside), each)),
        false_alarms_at_most=most_alarms(1 - CONFIDENCE),
        bound=bound(most_alarms(1 - CONFIDENCE)),
        passed=least_found(ALARM / 2) <= bound(most_alarms(ALARM / 2)),
    )


def _bound(facts: Mapping[str, Any], alarms: float) -> float:
    """The largest share of members that an attack can find, by the ledger."""
    if facts["epsilon"] is None:
        return 1.0
    if (tuning := facts.get("tuning")) is not None:
        search = Search(tuple(map(Event.from_dict, tuning["events"])), tuning["mean_runs"])
        return attack_rates_of_search(search, facts["delta"], alarms).true_positive_rate
    events = [{name: value for name, value in event.items() if name != "epsilon_alone"} for event in facts["events"]]
    return attack_rates(map(Event.from_dict, events), facts["delta"], alarms).true_positive_rate


def _some(histories: Sequence[np.ndarray], chance: np.random.Generator) -> list[np.ndarray]:
    chosen = np.sort(chance.choice(len(histories), min(MOST, len(histories)), replace=False))
    return [np.asarray(histories[place]) for place in chosen]


# What is asked, and how well the answers fit.


def _ranking_score(release: Release) -> Callable[[np.ndarray], float]:
    items = len(release.vocabulary)
    numbers = {name: number for number, name in enumerate(release.vocabulary)}
    missed = (min(LIST, items) + items) / 2 + 1  # a rank for what is not recommended at all

    def ranks(prefixes: Sequence[np.ndarray]) -> list[dict[int, int]]:
        answers = release.recommend(prefixes, LIST)
        return [{numbers[one["item_id"]]: rank for rank, one in enumerate(answer, 1)} for answer in answers]

    (for_nobody,) = ranks([np.zeros(0, dtype=np.int64)])

    def score(history: np.ndarray) -> float:
        places = [place for place in range(1, len(history)) if history[place] not in history[:place]]
        if not places:
            return -np.inf
        places = [places[n] for n in np.unique(np.linspace(0, len(places) - 1, POSITIONS).astype(int))]
        answers = ranks([history[:place] for place in places])
        gains = [
            np.log(for_nobody.get(int(history[place]), missed) / answer.get(int(history[place]), missed))
            for place, answer in zip(places, answers, strict=True)
        ]
        return float(np.mean(gains))

    return score


def _text_score(release: Release) -> Callable[[np.ndarray], float]:
    from dpformer.evaluation.language import generate

    def score(tokens: np.ndarray) -> float:
        if len(tokens) < 2:
            return -np.inf
        right = []
        for cut in np.unique(np.linspace(1, max(1, len(tokens) - AHEAD), CUTS).astype(int)):
            due = tokens[cut : cut + AHEAD]
            written = generate(release.model, tokens[:cut].tolist(), len(due), temperature=0)
            right.append(np.mean(np.array(written) == due))
        return float(np.mean(right))

    return score
