"""The privacy statement: what is promised about a run, how it is achieved, and what is not covered.

It is made from public facts alone (the plan and the options), never from the data, so it may be published with the
model; metrics appear in it only if they were released with noise and are in the ledger. One dict, for `privacy.json`;
`headline` and `words` express it in sentences.
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
from dpformer.format_number import one_in, percent, power_of_e, round_up, small
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
    "While a run is unfinished, checkpoint/ holds the keys of sampling and noise, with which the noise could be "
    "removed. It is deleted when the run has finished.",
    "Each further run on the same users spends further budget, as does choosing between runs by their results.",
    "Information leaked by the time or memory of the computation, and access to the machine while it runs.",
)
GIVEN = "the item list"
GIVEN_PRIOR = "what earlier runs released"
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
    prior: Mapping[str, Any] | None = None,
    model: str | None = None,
    budget: dict[str, Any] | None = None,
    commitment: str | None = None,
) -> dict[str, Any]:
    """The statement of a run.

    Args:
        events: what took place: the ledger, not the plan.
        delta: total δ.
        target: the target ε; inf without privacy.
        clipping: "normalize" or "clip".
        clip_norm: C.
        expected_batch_size: B, by which sums are divided.
        users: N, assumed public.
        seeded: random numbers were seeded, so there is no guarantee.
        data: sentences on filters, vocabulary, sequences, split; nothing computed from the data.
        hashes: of the config, and of the data under a secret salt.
        unit: what one sample is, and what is protected.
        stated: query results that the statement contains, such as metrics; the ledger must hold their events.
        given: the item list was taken from the data unprotected: the guarantee is conditional on it.
        prior: earlier runs whose counts or weights this one uses (`runs.previous`): the guarantee is conditional on
            them.
        model: kind of model: counts, transformer, …; chosen by the user, or by public numbers alone (`kinds/auto.py`).
        budget: the budget of the data over many runs when the ledger recorded this run: `Budget.facts`.
        commitment: hash of the key of all random numbers (`runs.keys`), which reveals nothing about it.
    """
    ledger, stated = list(events), stated or {}
    paid = {query.stated for event in ledger if (query := query_of(event.label)) is not None}
    if unpaid := sorted(stated.keys() - paid):
        raise ValueError(f"{unpaid[0]} are stated, but the ledger does not hold them: they are not covered")
    noisy = math.isfinite(target)
    seeded = seeded or not all(getattr(event, "private", True) for event in ledger)
    epsilon = epsilon_of(ledger, delta) if noisy else math.inf
    if noisy and not epsilon <= target:
        raise ArithmeticError(f"the ledger has spent ε = {epsilon:.6g}, more than the target {target:g}")
    training = next((event for event in ledger if isinstance(event, PoissonGaussian)), None)
    noise = None if training is None else noise_of(training.to_dict())
    conditions = [GIVEN] * (given and noisy) + [GIVEN_PRIOR] * (prior is not None)
    facts: dict[str, Any] = {
        "format": FORMAT,
        "private": noisy and not seeded,
        "epsilon": epsilon if noisy else None,
        "epsilon_target": target if noisy else None,
        "delta": delta if noisy else None,
        "unit": unit.name,
        "adjacency": unit.adjacency,
        **({"given": " and ".join(conditions)} if conditions else {}),
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
        **({} if prior is None else {"prior": _with_all_runs(prior, ledger, delta)}),
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
    """Versions of the packages that determine the results."""
    return {**{name: version(name) for name in PACKAGES}, "python": platform.python_version()}


def headline(facts: dict[str, Any]) -> str:
    """The one-sentence summary."""
    if facts["epsilon"] is None:
        return (
            f"NOT PRIVATE: trained without clipping and without noise; there is no guarantee for any {facts['unit']}."
        )
    budget = f"ε = {round_up(facts['epsilon'])}, δ = {small(facts['delta'])}"
    if not facts["private"]:
        return f"NOT PRIVATE: noise for {budget} was seeded, so anyone can reproduce it; for tests only."
    unit, given = unit_of(facts["unit"]), f", given {facts['given']}" if "given" in facts else ""
    assumed = "".join(f" ASSUMED: {one}." for one in assumed_in(facts))
    return (
        f"{unit.name.capitalize()}-level differential privacy: {budget}, under adding or removing "
        f"{unit.whole}{given}.{assumed}"
    )


def words(facts: dict[str, Any]) -> list[str]:
    """The statement for readers without a mathematical background, one or two sentences per point."""
    if facts["epsilon"] is None:
        return [facts.get("headline") or headline(facts)]
    unit = unit_of(facts["unit"])
    sentences = [
        unit.meaning,
        "Whatever anyone does with the released model, now or later, the probability of any outcome depends only "
        f"slightly on whether {unit.given} was used: the two probabilities differ by a factor of at most "
        f"{power_of_e(facts['epsilon'])} (e to the power ε), apart from an event of probability at most "
        f"{one_in(facts['delta'])} (δ). That is the worst case, against someone who knows everything else; the "
        "smaller ε, the stronger the guarantee.",
    ]
    if "attack" in facts:
        sentences.append(attack_words(facts["attack"], unit))
    if GIVEN in facts.get("given", ""):
        sentences.append(
            f"This holds given {GIVEN}, which was taken from the data without protection: that an item is in "
            "the model reveals that someone has it, and the ε above does not cover that."
        )
    if "prior" in facts:
        prior = facts["prior"]
        sentences.append(
            f"The model also uses {GIVEN_PRIOR}, which the ε above does not include. For a {unit.name} whose data was "
            f"in all {prior['runs'] + 1} runs, ε is {round_up(prior['epsilon'])} in total, at δ = "
            f"{small(prior['delta'] + facts['delta'])}; other runs on the same data add to that."
        )
    if facts["steps"]:
        sentences.append(noise_of(facts).sentence(facts, unit))
    sentences += [f"All of this rests on an assumption: {one}." for one in assumed_in(facts)]
    for event in facts["events"]:
        if event["kind"] == "gaussian":
            query, label = query_of(event["label"]), event["label"] or "a release"
            sentences.append(touch(label, event, unit) if query is None else query.words(event, facts, unit))
    if not facts["private"]:
        sentences.insert(0, "The random numbers of this run were seeded, so none of this is guaranteed.")
    return sentences


def assumed_in(facts: Mapping[str, Any]) -> list[str]:
    """What the events of a statement assume without a check, each once."""
    labels = [str(event["label"]) for event in facts.get("events", ())]
    return [one for one in ASSUMPTIONS if any(one in label for label in labels)]


def attack_words(attack: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
    """The meaning of ε for one person, by the best possible attack."""
    likely, rare = (percent(attack["precision"][prior]) for prior in ("0.5", "0.01"))
    alarms, found = percent(attack["false_positive_rate"]), percent(attack["true_positive_rate"])
    return (
        f"An attack that tries to tell which {unit.plural} were in the data, and accuses {alarms} of those who were "
        f"not, finds at most {found} of those who were, whatever else it knows. At most {likely} of its accusations "
        f"are right if half of all candidates were in the data, and at most {rare} if one in a hundred was. An attack "
        "that accuses fewer may be right more often."
    )


def stated_in(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The query results that a statement contains."""
    return {query.stated: facts[query.stated] for query in all_queries() if query.stated and query.stated in facts}


def _with_all_runs(prior: Mapping[str, Any], ledger: Sequence[Event], delta: float) -> dict[str, Any]:
    """The earlier runs, with ε of all runs together at the sum of their δ."""
    events = [Event.from_dict({k: v for k, v in one.items() if k != "epsilon_alone"}) for one in prior["events"]]
    return {**prior, "epsilon": epsilon_of([*events, *ledger], prior["delta"] + delta)}


def _with_cost(event: Event, delta: float) -> dict[str, Any]:
    return {**event.to_dict(), "epsilon_alone": epsilon_of([event], delta)}
