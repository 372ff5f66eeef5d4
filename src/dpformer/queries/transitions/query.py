"""The query for transition counts: asks for the release of `rounds`, stores it in the run folder and checks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dpformer.accounting.events import Event, Gaussian
from dpformer.data.near_pairs import near_pairs
from dpformer.engines.cells import cells_below
from dpformer.findings import Finding
from dpformer.noise.randomness import public_grid
from dpformer.queries.base import Answer, Arrays, Canaries, Inspection, Question
from dpformer.queries.popularity import PopularityQuery
from dpformer.queries.transitions.attribute_evidence import AttributeEvidence
from dpformer.queries.transitions.prior import KINDS as PRIOR
from dpformer.queries.transitions.prior import PREFIX, Prior
from dpformer.queries.transitions.rounds import (
    LABEL,
    ROUNDS,
    RoundRelease,
    TransitionRelease,
    again_wanted,
    deviation_of,
    deviation_of_evidence,
    exact_transition_sums,
    final_deviations,
    noise_of_pairs,
    release_transition_sums,
    round_of_items,
)

if TYPE_CHECKING:
    from dpformer.noise import SecureRandom
    from dpformer.runs.config import Config
    from dpformer.training.plan import Plan

KINDS: dict[str, tuple[type, int]] = {
    "popularity": (np.float64, 1),
    "items": (np.int64, 1),
    "pairs": (np.int64, 2),
    "total": (np.float64, 1),
    "difference": (np.float64, 1),
}
AGAIN = "again"  # popularity, if released twice
EVIDENCE = "evidence"  # noisy sums of near and other pairs, if items have attributes
NEAR = "near"  # the number of near pairs of items
PARTS: dict[str, type] = {"cells": np.int64, "noisy": np.float64}  # arrays of a round
ROUND = re.compile(f"(?P<part>{'|'.join(PARTS)}) (?P<number>[0-{len(ROUNDS) - 1}])")


class TransitionsQuery(PopularityQuery):
    """Which items follow which, their popularity and, if there is no public list, which items there are."""

    label = LABEL
    sentence = "which items follow which"
    share_option = "warm_start"

    def asked(self, config: Config) -> bool:
        return config.kind.release is self or bool(config.warm_start)

    def run(self, question: Question, event: Event, random: SecureRandom) -> Answer:
        from dpformer.queries.transitions.backend import transition_sums

        config, dataset = question.config, question.dataset
        with transition_sums(dataset, config.engine, config.memory) as sums:
            found = release_transition_sums(
                sums,
                dataset.num_items,
                event.noise_multiplier,
                delta=event.failure,
                near=_near(question),
                random=random,
            )
        self.refuse_short_list(found, config, event)
        return Answer(found, found.event)

    def exact(self, question: Question) -> TransitionRelease:
        from dpformer.queries.transitions.backend import transition_sums

        with transition_sums(question.dataset, question.config.engine, question.config.memory) as sums:
            return exact_transition_sums(sums, question.dataset.num_items, _near(question))

    def deviation(self, config: Config, event: Event, *, twice: bool = False) -> float:
        """Popularity is the first round."""
        first = round_of_items(listed=config.items_policy == "dp", again=twice)
        return deviation_of(first, event.noise_multiplier)

    # Kept.

    def arrays(self, value: Any, config: Config) -> dict[str, np.ndarray]:
        """All rounds; only popularity if a network started from them, because it has been trained since."""
        popularity = super().arrays(value, config)
        if config.warm_start:
            return popularity
        again = {} if value.again is None else {AGAIN: value.again}
        if value.evidence is not None:
            near = round(value.evidence.chance * cells_below(len(value.frequencies.counts)))
            again |= {EVIDENCE: value.evidence.sums, NEAR: np.array([near])}
        rounds = {f"{part} {one.number}": getattr(one, part) for one in value.rounds for part in PARTS}
        prior = {} if value.prior is None else value.prior.arrays()
        return (
            popularity
            | prior
            | {name: getattr(value, name) for name in KINDS if name not in popularity}
            | again
            | rounds
        )

    def array_kinds(self, name: str) -> tuple[type, int] | None:
        if name in (AGAIN, EVIDENCE):
            return KINDS["popularity"]
        if name == NEAR:
            return KINDS["items"]
        if name.startswith(PREFIX):
            return PRIOR.get(name.removeprefix(PREFIX))
        found = ROUND.fullmatch(name)
        return KINDS.get(name) if found is None else (PARTS[found["part"]], 1)

    def restore(self, arrays: Arrays, config: Config, plan: Plan) -> Any:
        """Rebuild the release: its standard deviations follow from σ."""
        if config.warm_start:
            return super().restore(arrays, config, plan)
        _check_names(arrays)
        event, again = next(event for event in plan.events if event.label == self.label), arrays.get(AGAIN)
        assert isinstance(event, Gaussian)
        evidence = _evidence(arrays, plan.users, event.noise_multiplier)
        total, difference = final_deviations(
            event.noise_multiplier,
            listed=config.items_policy == "dp",
            again=again is not None,
            evidence_of=None if evidence is None else plan.users,
        )
        numbers = sorted({int(name.split()[1]) for name in arrays if ROUND.fullmatch(name)})
        found = TransitionRelease(
            items=arrays["items"],
            pairs=arrays["pairs"],
            total=arrays["total"],
            total_deviation=total,
            difference=arrays["difference"],
            difference_deviation=difference,
            frequencies=self.restored_frequencies(arrays["popularity"], config, plan, twice=again is not None),
            event=event,
            rounds=tuple(RoundRelease(n, arrays[f"cells {n}"], arrays[f"noisy {n}"]) for n in numbers),
            again=again,
            evidence=evidence,
            prior=Prior.restored(arrays, len(arrays["popularity"])),
        )
        _check_places(found)
        return found

    def parts(self, value: Any) -> list[np.ndarray]:
        counts, again = value.frequencies.counts, getattr(value, "again", None)
        return [counts] if again is None else [2 * counts - again, again]

    # Verified.

    def problem(self, seen: Inspection, arrays: Arrays) -> str:
        wrong = super().problem(seen, arrays)
        if wrong or seen.config.warm_start:
            return wrong
        value = self.restore(arrays, seen.config, seen.plan())
        if (value.prior is not None) != (seen.config.previous is not None):
            return "there is a prior without an earlier run in config.toml, or the reverse"
        if _described(seen.config) != (value.evidence is not None):
            return "evidence for attributes was released without need, or is missing"
        if value.evidence is not None and (value.evidence.sums / public_grid(value.evidence.deviation) % 1).any():
            return "the evidence for attributes is not on the grid of its noise, so no release produced it"
        strong = value.evidence is not None and value.evidence.strong
        due = strong and again_wanted(self.parts(value)[0], seen.statement["users"])
        return (
            ""
            if due == (value.again is not None)
            else "popularity was released once instead of twice, or twice instead of once"
        )

    def checks(self, seen: Inspection) -> Iterator[Callable[[], Finding]]:
        yield from super().checks(seen)
        if self.asked(seen.config) and seen.config.private:
            yield lambda: self.noise_of_transitions(seen)

    def noise_of_transitions(self, seen: Inspection) -> Finding:
        """Round by round (noise_check.py)."""
        from dpformer.queries.transitions.backend import array_sums
        from dpformer.queries.transitions.noise_check import wrong_with_evidence, wrong_with_rounds

        name, arrays = "noise of transitions", seen.arrays()
        if seen.config.warm_start:
            return Finding(name, None, "not checked: the network has been trained since")
        if seen.dataset is None or arrays is None:
            return Finding(name, None, "not checked: the data was not read")
        value = self.restore(arrays, seen.config, seen.plan())
        placed = np.full(len(value.frequencies.p) + 1, -1)  # the last index stands for items that were not released
        placed[value.items] = np.arange(len(value.items))
        places = placed[seen.vocabulary().match(list(seen.dataset.vocabulary.ids))]
        first = round_of_items(listed=seen.config.items_policy == "dp", again=value.again is not None)
        evidence_of = None if value.evidence is None else seen.plan().users
        sigma = noise_of_pairs(first, value.event.noise_multiplier, evidence_of=evidence_of)
        sums, known = array_sums(seen.dataset), seen.dataset.vocabulary.attributes or seen.attributes()
        wrong = wrong_with_rounds(value, sums, places, sigma)
        if value.evidence is not None:
            if known is None:
                return Finding(name, None, "not checked: the catalogue was not read")
            if list(seen.dataset.vocabulary.ids) != list(seen.vocabulary().ids):
                return Finding(name, False, "the items are not those of the data")
            near = near_pairs(known)
            wrong = wrong or wrong_with_evidence(value.evidence, sums, near, seen.dataset.num_items)
        if wrong:
            return Finding(name, False, wrong)
        kept = {one.number for one in value.rounds}
        missing = ", ".join(str(number + 1) for number in range(len(ROUNDS)) if number not in kept)
        if missing:
            return Finding(
                name, None, f"present in the other rounds; not checked: rounds with too many pairs ({missing})"
            )
        return Finding(name, True, f"present in all {len(ROUNDS)} rounds, from which the counts follow")

    # Audited.

    def canary_count(self, wanted: int) -> int:
        from dpformer.queries.transitions.canaries import canary_count

        return canary_count(wanted)

    def canaries(self, event: Gaussian, member: np.ndarray, seed: int | None = None) -> Canaries:
        from dpformer.queries.transitions.canaries import canaries

        return canaries(event, member, seed)


def _described(config: Config) -> bool:
    """Whether the evidence for attributes is released: items have public attributes, and the model uses them."""
    return config.kind.items_described(config) and config.items_policy != "dp"


def _near(question: Question) -> np.ndarray | None:
    attributes = question.dataset.vocabulary.attributes
    return near_pairs(attributes) if attributes is not None and _described(question.config) else None


def _evidence(arrays: Arrays, users: int, noise_multiplier: float) -> AttributeEvidence | None:
    if EVIDENCE not in arrays:
        return None
    near, size = arrays.get(NEAR, np.zeros(0)), cells_below(len(arrays["popularity"]))
    if len(arrays[EVIDENCE]) != 2 or len(near) != 1 or not 0 <= near[0] <= size:
        raise ValueError("the evidence for attributes is not two sums and a number of pairs")
    deviation = deviation_of_evidence(users, noise_multiplier)
    return AttributeEvidence(arrays[EVIDENCE], float(near[0]) / max(size, 1), deviation)


def _check_names(arrays: Arrays) -> None:
    rounds = [name for name in arrays if ROUND.fullmatch(name)]
    numbers = {name.split()[1] for name in rounds}
    if not KINDS.keys() <= arrays.keys():
        raise ValueError(f"{', '.join(sorted(KINDS.keys() - arrays.keys()))} is missing")
    if len(rounds) != len(PARTS) * len(numbers):
        raise ValueError("a round lacks its cells or its noisy counts")


def _check_places(found: TransitionRelease) -> None:
    """Indices of items and pairs must be in range."""
    size, m, count = len(found.frequencies.counts), len(found.items), len(found.pairs)
    inside = not m or (found.items[0] >= 0 and found.items[-1] < size and (np.diff(found.items) > 0).all())
    paired = found.pairs.shape == (count, 2)
    if paired and count:
        low, high = found.pairs.T
        paired = bool((low >= 0).all() and (low < high).all() and int(high.max()) < m)
    if found.again is not None and len(found.again) != size:
        raise ValueError("the second release of popularity has other items")
    if not inside or not paired or len(found.total) != count or len(found.difference) != count:
        raise ValueError("its pairs contain items that it does not have")
    for one in found.rounds:
        fits = len(one.noisy) == len(one.cells) * (2 if ROUNDS[one.number].directed else 1)
        if not fits or (len(one.cells) and (one.cells[0] < 0 or one.cells[-1] >= m * (m - 1) // 2)):
            raise ValueError(f"round {one.number} contains pairs of other items")
        if (np.diff(one.cells) <= 0).any():
            raise ValueError(f"the pairs of round {one.number} are not in order")


TRANSITIONS = TransitionsQuery()
