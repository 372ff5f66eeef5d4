"""What NIST SP 800-226 asks of a claim of differential privacy, beyond ε, δ and the unit: answers of a statement.

Everything follows from the other facts of the statement, so `verify` makes it again and compares it.
"""

from __future__ import annotations

from typing import Any

from dpformer.accounting.units import unit_of
from dpformer.format_number import plain, round_up

NAME = "nist_sp_800_226"
TRUST = (
    "central: whoever trains has the data and is trusted with it; the promise is against everybody else, who sees what "
    "is released"
)
DATA_SOURCE = "static: the data as it was when it was read; none came in afterwards"
POST_PROCESSING = (
    "weights, scores, rankings and texts are computed from noisy sums and public facts alone; that costs no budget, "
    "however often it is done"
)
FLOATING_POINT = (
    "sums and noise are added in float64 and rounded to a public grid of at most 2⁻¹⁰ of the noise's standard "
    "deviation; bounds on what one adds allow for rounding"
)
SIDE_CHANNELS = (
    "not protected: time and memory of the computation, and access to the machine. Nobody asks the data questions: it "
    "is a job that runs once, so there are no answers to time"
)


def nist_fields(facts: dict[str, Any]) -> dict[str, str]:
    """The answers, from the facts of a statement."""
    if facts["epsilon"] is None:
        return {"trust_model": TRUST, "variant": "none: no noise was added"}
    unit = unit_of(facts["unit"])
    return {
        "trust_model": TRUST,
        "variant": "(ε, δ)-differential privacy (approximate DP)",
        "unit": f"{unit.name}: {unit.whole}, or nothing in its place",
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
        f"one: what is in the ledger ({labels}) is published together, once; a further run would be a further release"
    )


def _pre_processing(facts: dict[str, Any]) -> str:
    start = f"each {unit_of(facts['unit']).name}'s data by itself, as `data` says"
    if "given" in facts:
        return f"{start}; {facts['given']} was taken from everybody's data, and the guarantee is given that list"
    return f"{start}; what was learnt from several of them together is in the ledger"


def _tuning(facts: dict[str, Any]) -> str:
    if "tuning" in facts:
        return f"on the same data, {plain(facts['tuning']['mean_runs'])} runs on average; ε is of all of it"
    return "none is counted: whoever chose settings by results on the same data has spent more than ε"


def _remaining(facts: dict[str, Any]) -> str:
    asked = f"ε = {plain(facts['epsilon_target'])} was asked for"
    if "tuning" in facts:
        asked = f"{asked} of one run, and the search spent {round_up(facts['epsilon'])}"
    if "budget" in facts:
        began = "of this run" if "tuning" not in facts else "in all"
        return f"{asked} {began}; {spent_of(facts['budget'])}, when this one began"
    if "tuning" in facts:
        return f"none: {asked}"
    return (
        f"none: {asked}, {round_up(facts['epsilon'])} is spent, and the run is over. A budget over several runs is "
        "kept by a ledger, of which this statement does not know"
    )


def spent_of(budget: dict[str, Any]) -> str:
    """What a ledger says is spent of the budget of the data."""
    runs = budget["runs"]
    return (
        f"by the ledger of this data ε = {round_up(budget['spent'])} of {plain(budget['epsilon'])} is spent at δ = "
        f"{plain(budget['delta'], 3, up=True)} by {runs} {'run' if runs == 1 else 'runs'}, and the rest is left"
    )
