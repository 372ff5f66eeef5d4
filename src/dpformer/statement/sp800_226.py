"""Answers to what NIST SP 800-226 asks of a claim of differential privacy, beyond ε, δ and the unit.

Everything follows from the other facts of the statement, so `verify` recomputes and compares it.
"""

from __future__ import annotations

from typing import Any

from dpformer.accounting.units import unit_of
from dpformer.format_number import plain, round_up, small

NAME = "nist_sp_800_226"
TRUST = (
    "central: the curator has the data and is trusted with it; the guarantee holds against everyone else, who sees "
    "what is released"
)
DATA_SOURCE = "static: the data at the time of reading; none was added afterwards"
POST_PROCESSING = (
    "weights, scores, rankings and texts are computed from noisy sums and public facts alone, which costs no budget, "
    "however often it is done"
)
FLOATING_POINT = (
    "sums and noise are added in float64 and rounded to a public grid of at most 2⁻¹⁰ of the noise's standard "
    "deviation; bounds on each user's contribution allow for rounding"
)
SIDE_CHANNELS = (
    "not protected: time and memory of the computation, and access to the machine. There is no interactive interface "
    "to the data: training is a job that runs once, so there are no answers to time"
)


def nist_fields(facts: dict[str, Any]) -> dict[str, str]:
    """The answers, from the facts of a statement."""
    if facts["epsilon"] is None:
        return {"trust_model": TRUST, "variant": "none: no noise was added"}
    unit = unit_of(facts["unit"])
    return {
        "trust_model": TRUST,
        "variant": "(ε, δ)-differential privacy (approximate DP)",
        "unit": f"{unit.name}: adding or removing {unit.whole}",
        "releases": _releases(facts),
        "data_source": DATA_SOURCE,
        "pre_processing": _pre_processing(facts),
        "tuning": _tuning(facts),
        "post_processing": POST_PROCESSING,
        "floating_point": FLOATING_POINT,
        "side_channels": SIDE_CHANNELS,
        "remaining_budget": _remaining(facts),
    }


def _releases(facts: dict[str, Any]) -> str:
    labels = ", ".join(event["label"] or event["kind"] for event in facts["events"])
    return (
        f"one: the results in the ledger ({labels}) are published together, once; a further run would be a further "
        "release"
    )


def _pre_processing(facts: dict[str, Any]) -> str:
    start = f"each {unit_of(facts['unit']).name}'s data by itself, as `data` says"
    if "given" in facts:
        return f"{start}; {facts['given']}: taken from everyone's data, and the guarantee is conditional on it"
    return f"{start}; what was learnt from several of them together is in the ledger"


def _tuning(facts: dict[str, Any]) -> str:
    if "tuning" in facts:
        return f"on the same data, {plain(facts['tuning']['mean_runs'])} runs on average; ε covers the whole search"
    return "none is counted: choosing settings by results on the same data would spend more than ε"


def _remaining(facts: dict[str, Any]) -> str:
    asked = f"the target was ε = {plain(facts['epsilon_target'])}"
    if "tuning" in facts:
        asked = f"{asked} for one run, and the search spent {round_up(facts['epsilon'])}"
    if "budget" in facts:
        scope = "for this run" if "tuning" not in facts else "in total"
        return f"{asked} {scope}; at its start, {spent_of(facts['budget'])}"
    if "tuning" in facts:
        return f"none: {asked}"
    return (
        f"none: {asked}, {round_up(facts['epsilon'])} is spent, and the run is over. This run is not part of a budget "
        "over several runs"
    )


def spent_of(budget: dict[str, Any]) -> str:
    """The spent part of the budget of the data, according to its ledger."""
    runs = f"{budget['runs']} {'run' if budget['runs'] == 1 else 'runs'}"
    return (
        f"ε = {round_up(budget['spent'])} of {plain(budget['epsilon'])} at δ = {small(budget['delta'])} spent by "
        f"{runs}, according to the ledger of this data"
    )
