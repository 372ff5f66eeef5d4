"""A comparison of runs as one HTML page, in the style of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from dpformer.evaluation.metrics import headline, released
from dpformer.files import write_text
from dpformer.format_number import percent, round_up, small
from dpformer.report.comparison import NOTE, Comparison, Side
from dpformer.report.page import rendered
from dpformer.report.svg import Group, dot_chart


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page; one with exact accuracy is readable by its owner alone."""
    html = rendered(
        "comparison.html",
        comparison=comparison,
        sides=comparison.sides,
        budgets=budgets(comparison.sides),
        rows=accuracies(comparison.sides),
        intervals=any(side.measured is not None and side.measured.kind == "ranking" for side in comparison.sides),
        chart=_chart(comparison.sides),
        heading=headline().heading(),
        note=NOTE,
    )
    write_text(Path(path), html, private=not comparison.public)
    return Path(path)


def budgets(sides: tuple[Side, ...]) -> list[tuple[str, list[str]]]:
    """Rows with the guarantee, how the budget was spent, and metrics that were released within it."""
    statements = [side.run.statement for side in sides]
    rows = [
        ("ε", [_epsilon(facts) for facts in statements]),
        ("δ", ["–" if facts["delta"] is None else small(facts["delta"]) for facts in statements]),
        ("protects", [facts["unit"] if facts["private"] else "no one: not private" for facts in statements]),
        ("N, assumed public", [f"{facts['users']:,}" for facts in statements]),
        ("model", [str(facts.get("model", "–")) for facts in statements]),
        ("members found at a false positive rate of 1%, at most", [_found(facts) for facts in statements]),
    ]
    labels = list(dict.fromkeys(event["label"] or event["kind"] for facts in statements for event in facts["events"]))
    rows += [(f"{label}: ε on its own", [_alone(facts, label) for facts in statements]) for label in labels]
    for metric in released():
        values = [_noisy(facts, metric.label()) for facts in statements]
        if any(value != "–" for value in values):
            rows.append((f"{metric.heading()}, with noise", values))
    return rows


def accuracies(sides: tuple[Side, ...]) -> list[tuple[str, list[dict[str, float] | None]]]:
    """Rows of exact metrics; None if a run was not evaluated."""
    found = [side.accuracy for side in sides]
    names = list(dict.fromkeys(name for one in found if one is not None for name in one))
    return [
        (name.upper().replace("_", " "), [None if one is None else one.get(name) for one in found]) for name in names
    ]


def _chart(sides: tuple[Side, ...]) -> Markup | None:
    found = [(side.name, side.accuracy) for side in sides]
    label = headline().label()
    groups = [
        Group(name, [(one[label]["value"], one[label]["low"], one[label]["high"])])
        for name, one in found
        if one is not None and label in one
    ]
    if len(groups) < 2 or len(groups) > 6 or any(len(group.label) > 60 // len(groups) for group in groups):
        return None  # names would overlap; the table shows the same
    return dot_chart(groups, ("run",), x_label="run", y_label=headline().heading())


def _epsilon(facts: dict[str, Any]) -> str:
    return "∞" if facts["epsilon"] is None else round_up(facts["epsilon"])


def _found(facts: dict[str, Any]) -> str:
    return percent(facts["attack"]["true_positive_rate"]) if "attack" in facts else "–"


def _alone(facts: dict[str, Any], label: str) -> str:
    costs = [event["epsilon_alone"] for event in facts["events"] if (event["label"] or event["kind"]) == label]
    return round_up(costs[0]) if costs else "–"


def _noisy(facts: dict[str, Any], label: str) -> str:
    found = facts.get("metrics")
    return "–" if found is None else f"{found[label]:.4f} ± {found['deviation']:.4f}"
