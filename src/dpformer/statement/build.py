"""The privacy statement: what is promised about a run, how it is achieved, and what is not covered.

It is made from public facts only (the plan and the choices), never from the data, so it may be published with the
model; metrics are in it only if they were released with noise and are in the ledger. One dict, for `privacy.json`;
`headline` and `words` say the same in sentences.
"""

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.attack_rates import attack_rates
from dpformer.accounting.events import ASSUMPTIONS, Event, PoissonGaussian
from dpformer.accounting.units import USER, UnitOfPrivacy, unit_of
from dpformer.format_number import one_in, percent, plain, power_of_e, round_up
from dpformer.noise.mechanisms import noise_of
from dpformer.queries.base import touch
from dpformer.queries.registry import all_queries, query_of
from dpformer.statement import sp800_226

FORMAT = 2
DATA_HASH = "data (salted; the salt is in checkpoint/)"
HASHES = ("config", DATA_HASH, "releases", "model")
NOT_COVERED = (
    "The training loss, gradient norms, batch sizes and counts in metrics.jsonl, and curves drawn from them, are exact "
    "statistics of the data: keep them as private as the data.",
    "Exact metrics on users' own held-out items, such as `dpformer evaluate` prints, are statistics of the data too.",
    "While a run is unfinished, checkpoint/ holds the keys of sampling and noise: whoever has them can take the noise "
    "off. It is deleted when the run is done.",
    "Each further run on the same users spends further budget, and so does choosing between runs by their results.",
    "What the time or memory of the computation gives away, and access to the machine while it runs.",
)
GIVEN = "the list of items"
PACKAGES = ("dpformer", "torch", "numpy", "dp-accounting", "cryptography")


def statement(
    events: Iterable[Event],
    *,
    delta: float,
    target: float,
    clipping: str,
    clip_norm: float,
    expected_batch_size: float,
    users: int,
    seeded: bool,
    data: Sequence[str],
    hashes: dict[str, str],
    unit: UnitOfPrivacy = USER,
    stated: Mapping[str, Any] | None = None,
    given: bool = False,
    model: str | None = None,
    budget: dict[str, Any] | None = None,
    commitment: str | None = None,
) -> dict[str, Any]:
    """The statement of a run.

    Args:
        events: every touch of the data that happened: the ledger, not the plan.
        delta: δ of the whole.
        target: the ε that was asked for; inf without privacy.
        clipping: "normalize" or "clip".
        clip_norm: C.
        expected_batch_size: B, by which sums are divided.
        users: N, assumed public.
        seeded: random numbers came from a seed, so nothing is promised.
        data: sentences on filters, vocabulary, sequences, split; nothing counted.
        hashes: of the config, and of the data under a secret salt.
        unit: what one sample is, and what is protected.
        stated: values of queries that the statement itself holds, such as metrics; the ledger has to hold their events.
        given: the list of items was taken from the data unprotected: the guarantee is given that list.
        model: what was made: counts, transformer, …; chosen by the user, or by public numbers alone (`choice.py`).
        budget: of the data over many runs, as its ledger had it when this run was written down: `Budget.facts`.
        commitment: to the key of all random numbers: its hash (`runs.keys`), which tells nothing about it.
    """
    ledger, stated = list(events), stated or {}
    paid = {query.stated for event in ledger if (query := query_of(event.label)) is not None}
    if unpaid := sorted(stated.keys() - paid):
        raise ValueError(f"{unpaid[0]} are stated that the ledger does not hold: they are not covered")
    noisy = math.isfinite(target)
    seeded = seeded or not all(getattr(event, "private", True) for event in ledger)
    epsilon = epsilon_of(ledger, delta) if noisy else math.inf
    if noisy and not epsilon <= target:
        raise ArithmeticError(f"the ledger has spent ε = {epsilon:.6g}, more than the {target:g} that was asked for")
    training = next((event for event in ledger if isinstance(event, PoissonGaussian)), None)
    noise = None if training is None else noise_of(training.to_dict())
    facts: dict[str, Any] = {
        "format": FORMAT,
        "private": noisy and not seeded,
        "epsilon": epsilon if noisy else None,
        "epsilon_target": target if noisy else None,
        "delta": delta if noisy else None,
        "unit": unit.name,
        "adjacency": unit.adjacency,
        **({"given": GIVEN} if given and noisy else {}),
        **({} if model is None else {"model": model}),
        "users": users,
        "accountant": "privacy loss distributions (dp-accounting), all events composed jointly" if noisy else None,
        "sampler": None if noise is None else noise.sampler,
        "sample_rate": getattr(training, "sample_rate", None),
        "steps": getattr(training, "steps", None),
        "expected_batch_size": expected_batch_size if training is not None else None,
        "noise_multiplier": getattr(training, "noise_multiplier", None),
        **({} if noise is None else noise.settings()),
        "clipping": clipping if noisy and training is not None else None,
        "clip_norm": clip_norm if noisy and training is not None else None,
        "events": [_with_cost(event, delta) for event in ledger] if noisy else [],
        **stated,
        **({} if budget is None else {"budget": budget}),
        **({"attack": attack_rates(ledger, delta).to_dict()} if noisy and not seeded else {}),
        "random_source": "seed (for tests only)" if seeded else "operating system key, ChaCha20",
        **({} if commitment is None else {"key_commitment": commitment}),
        "data": list(data),
        "not_covered": list(NOT_COVERED),
        "hashes": hashes,
        "versions": versions(),
    }
    facts[sp800_226.NAME] = sp800_226.nist_fields(facts)
    return {**facts, "headline": headline(facts), "words": words(facts)}


def versions() -> dict[str, str]:
    """Of what makes the numbers, as installed here."""
    return {**{name: version(name) for name in PACKAGES}, "python": platform.python_version()}


def headline(facts: dict[str, Any]) -> str:
    """One sentence on top of everything."""
    if facts["epsilon"] is None:
        return (
            f"NOT PRIVATE: trained without clipping and without noise; nothing is promised about any {facts['unit']}."
        )
    budget = f"ε = {round_up(facts['epsilon'])}, δ = {plain(facts['delta'], 3, up=True)}"
    if not facts["private"]:
        return f"NOT PRIVATE: noise for {budget} was drawn from a seed, which anybody can repeat; a run for tests."
    unit, given = unit_of(facts["unit"]), f", given {facts['given']}" if "given" in facts else ""
    assumed = "".join(f" ASSUMED: {one}." for one in assumed_in(facts))
    return (
        f"{unit.name.capitalize()}-level differential privacy with {budget}, for {unit.whole} or nothing in its place"
        f"{given}.{assumed}"
    )


def words(facts: dict[str, Any]) -> list[str]:
    """The statement for a reader without mathematics, a sentence or two a point."""
    if facts["epsilon"] is None:
        return [facts.get("headline") or headline(facts)]
    unit = unit_of(facts["unit"])
    sentences = [
        unit.meaning,
        "Whatever anybody does with the released model, now or later: how likely an outcome is depends only so much on "
        f"whether {unit.given} was used. The two probabilities differ by a factor of at most "
        f"{power_of_e(facts['epsilon'])} (e to the power ε), apart from an event of probability at most "
        f"{one_in(facts['delta'])} (δ). That is the worst case, against somebody who knows everything else; the "
        "smaller ε, the stronger the promise.",
    ]
    if "attack" in facts:
        sentences.append(attack_words(facts["attack"], unit))
    if "given" in facts:
        sentences.append(
            f"This holds given {facts['given']}, which was taken from the data without protection: that an item is in "
            "the model says that somebody has it, and the ε above does not cover that."
        )
    if facts["steps"]:
        sentences.append(noise_of(facts).sentence(facts, unit))
    sentences += [f"All of this rests on an assumption: {one}." for one in assumed_in(facts)]
    for event in facts["events"]:
        if event["kind"] == "gaussian":
            query, label = query_of(event["label"]), event["label"] or "a release"
            sentences.append(touch(label, event, unit) if query is None else query.words(event, facts, unit))
    if not facts["private"]:
        sentences.insert(0, "The random numbers of this run came from a seed, so none of this is promised.")
    return sentences


def assumed_in(facts: Mapping[str, Any]) -> list[str]:
    """What the events of a statement assume on somebody's word, each once."""
    labels = [str(event["label"]) for event in facts.get("events", ())]
    return [one for one in ASSUMPTIONS if any(one in label for label in labels)]


def attack_words(attack: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
    """What ε means for one person, by the best attack there can be."""
    likely, rare = (percent(attack["precision"][prior]) for prior in ("0.5", "0.01"))
    alarms, found = percent(attack["false_positive_rate"]), percent(attack["true_positive_rate"])
    return (
        f"An attack that tries to tell which {unit.plural} were in the data, and accuses {alarms} of those who were "
        f"not, finds at most {found} of those who were, whatever it knows besides. Of its accusations at most {likely} "
        f"are right if half of all candidates were in the data, and at most {rare} if one in a hundred was. One that "
        "accuses fewer may be right more often."
    )


def stated_in(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The values of queries that a statement holds."""
    return {query.stated: facts[query.stated] for query in all_queries() if query.stated and query.stated in facts}


def _with_cost(event: Event, delta: float) -> dict[str, Any]:
    return {**event.to_dict(), "epsilon_alone": epsilon_of([event], delta)}
