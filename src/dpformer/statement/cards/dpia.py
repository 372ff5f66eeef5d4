"""One page for a data protection officer or manager who must approve: figures of the run, residual risks, blanks.

The headings of the risks follow EDPB Opinion 28/2024 (AI models and personal data) and NIST SP 800-226 (evaluating
differential privacy). What only the controller knows is a blank, or comes from `[deployment]`; nothing here is legal
advice, and the page claims nothing beyond the statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpformer.accounting.attack_rates import AttackRates, attack_rates, attack_rates_of_search
from dpformer.accounting.events import Event
from dpformer.accounting.searches import Search
from dpformer.accounting.units import unit_of
from dpformer.errors import DpformerError
from dpformer.format_number import one_in, percent, power_of_e, round_up
from dpformer.statement.cards.source import CardSource

BLANK = "_____"
ALARMS = (0.01, 0.001)
OUTSIDE = (
    "exact metrics and curves (metrics.jsonl, report.html), checkpoint/ of an unfinished run: as private as the data; "
    "privacy.json lists all of it under `not_covered`"
)
ERASURE = (
    "Delete the person's rows from the source, from copies of the log, from prepared data (`--cache`) and backups; "
    "delete checkpoint/, metrics.jsonl and report.html of runs on them, which are exact statistics.",
    "An unfinished run: stop it, delete its folder, start again without the person. What it spent stays in the ledger.",
    "A finished model keeps its guarantee: what it reveals about this person stays within the bounds above. Nothing "
    "can be removed from it afterwards; whether it must be withdrawn nevertheless is the controller's decision, case "
    "by case (Opinion 28/2024).",
    "The next run reads the log without the person. A model that is retrained regularly needs no special run.",
    "A key file kept for `verify --replay` needs the old data: after an erasure delete it, or record why it is kept.",
)


def assessment(source: CardSource) -> str:
    """The page, in Markdown; refused for a run without a guarantee."""
    facts, said = source.facts, source.deployment
    if not facts["private"]:
        raise DpformerError(
            "the run has no privacy guarantee (no noise, or seeded noise), so there is nothing to assess"
        )
    unit = unit_of(facts["unit"])
    parts = [
        f"# Privacy assessment: {_line(said.name) or BLANK}",
        f"Controller: {_line(said.curator) or BLANK}. Assessed by: {BLANK}. Date: {BLANK}. Model: SHA-256 "
        f"`{facts['hashes'].get('model', 'unknown')[:16]}…`. Full statement: privacy.json.",
        f"## What is protected\n\n**{facts['headline']}** {unit.meaning} {source.persons}".rstrip(),
        _meaning(facts, unit.plural),
        f"## Purpose and necessity (to be filled in)\n\n{_purpose(source)}",
        "## Residual risks: EDPB Opinion 28/2024\n\n" + _table(_opinion(source)),
        "## Residual risks: NIST SP 800-226\n\n" + _table(_nist(source)),
        f"## When a {unit.name} withdraws\n\n" + "\n".join(f"{n}. {words}" for n, words in enumerate(ERASURE, 1)),
        f"## Decision\n\nResidual risk: low / medium / high. Accepted by: {BLANK}. Review on: {BLANK}.",
    ]
    return "\n\n".join(parts) + "\n"


def _meaning(facts: Mapping[str, Any], members: str) -> str:
    """The meaning of ε for one person, as a table."""
    rows = [
        (
            f"falsely accuses {percent(rates.false_positive_rate)} of those not in the data",
            percent(rates.true_positive_rate),
            *(percent(share) for share in rates.precisions.values()),
        )
        for rates in (_rates(facts, alarms) for alarms in ALARMS)
    ]
    head = (
        "An attack that",
        f"finds at most this share of the {members}",
        "precision if half were members",
        "if 1 in 100 was",
    )
    lines = [head, ("---",) * len(head), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return (
        f"{table}\n\nThese bounds hold for every attack on the release, now or later, whatever else it knows. Being in "
        f"the data changes the probability of any outcome by at most a factor of {power_of_e(facts['epsilon'])}, apart "
        f"from an event of probability {one_in(facts['delta'])}."
    )


def _rates(facts: Mapping[str, Any], alarms: float) -> AttackRates:
    if "tuning" in facts:
        tuning = facts["tuning"]
        search = Search(tuple(map(Event.from_dict, tuning["events"])), tuning["mean_runs"])
        return attack_rates_of_search(search, tuning["delta"], alarms)
    events = [{name: value for name, value in event.items() if name != "epsilon_alone"} for event in facts["events"]]
    return attack_rates(map(Event.from_dict, events), facts["delta"], alarms)


def _purpose(source: CardSource) -> str:
    said = source.deployment
    rows = [
        ("Purpose and use", said.intended_use),
        ("Why personal data is needed for it", None),
        ("Legal basis; for legitimate interest: interest, necessity, balance", None),
        ("What people were told, and may expect", None),
        ("Data: source, period, region", "; ".join(filter(None, (said.data_period, said.region))) or None),
        ("Why this ε", said.justification),
    ]
    return "\n".join(f"- {name}: {_line(value) or BLANK}" for name, value in rows)


def _opinion(source: CardSource) -> list[tuple[str, str]]:
    facts = source.facts
    lawful = (
        f"{BLANK} (the guarantee does not address whether the data may be used; if it may not, later use is affected)"
    )
    return [
        (
            "Extraction from the model",
            "bounded as above, for weights and vocabulary alike; what many people share is learned, as intended",
        ),
        (
            "Personal data obtained through queries",
            "bounded as above however many questions are asked; a history that a user enters is not covered: it is "
            "new personal data held by the service",
        ),
        ("Design: sources, preparation, minimisation", _line(" ".join(facts["data"]))),
        ("Design: method", f"differential privacy in training, ε = {round_up(facts['epsilon'])}; {_spent(facts)}"),
        ("Tests and resistance to attacks", _line(source.audited)),
        ("Documentation", "privacy.json, config.toml, model card; `dpformer verify` lists what each claim rests on"),
        ("Legitimate interest: balance", f"{BLANK} (the bounds above are a mitigating measure)"),
        ("Unlawful processing in development", lawful),
    ]


def _nist(source: CardSource) -> list[tuple[str, str]]:
    facts = source.facts
    answers = facts.get("nist_sp_800_226", {})
    names = {
        "ε and unit": answers.get("unit"),
        "Composition: further releases on the same people": source.remaining,
        "Choice of settings": answers.get("tuning"),
        "Algorithms and numbers": answers.get("floating_point"),
        "Utility and bias": (f"rare items and rare tastes lose most to noise; checked for groups of people: {BLANK}"),
        "Side channels": answers.get("side_channels"),
        "Trust model": answers.get("trust_model"),
        "Security, access, policies": _line(source.deployment.access) or BLANK,
        "Data collection exposure": f"the raw log remains as sensitive as before; retention and access: {BLANK}",
    }
    return [(name, _line(value) or "unknown") for name, value in names.items()] + [("Outside the guarantee", OUTSIDE)]


def _spent(facts: Mapping[str, Any]) -> str:
    events = [
        f"{event['label'] or event['kind']} ({round_up(event['epsilon_alone'])} on its own)"
        for event in facts["events"]
    ]
    return f"spent on {', '.join(events)}"


def _table(rows: list[tuple[str, str]]) -> str:
    return "| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {words} |" for name, words in rows)


def _line(text: str | None) -> str:
    """One line without HTML, which cannot end a table cell."""
    return " ".join((text or "").replace("<", "&lt;").split()).replace("|", "\\|")
