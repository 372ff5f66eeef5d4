"""Results that a notebook shows as tables, and a terminal as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from dpformer.format_number import one_in, plain, round_up

STYLE = "text-align:left;padding:2px 12px 2px 0;vertical-align:top"


class Table(list[dict[str, Any]]):
    """Rows, and a note beneath them."""

    def __init__(self, rows: list[dict[str, Any]], note: str = "") -> None:
        super().__init__(rows)
        self.note = note

    def _repr_html_(self) -> str:
        names = list(self[0]) if self else []
        head = "".join(f"<th style='{STYLE}'>{escape(name)}</th>" for name in names)
        body = "".join("<tr>" + "".join(_cell(row[name]) for name in names) + "</tr>" for row in self)
        return f"<table><tr>{head}</tr>{body}</table>" + (f"<p>{escape(self.note)}</p>" if self.note else "")


class Facts(dict[str, Any]):
    """Names and values, such as a plan."""

    title = "Plan"

    def _repr_html_(self) -> str:
        shown = {
            name: value for name, value in self.items() if not isinstance(value, list | dict) and value is not None
        }
        rows = "".join(
            f"<tr><th style='{STYLE}'>{escape(name)}</th>{_cell(value)}</tr>" for name, value in shown.items()
        )
        return f"<b>{escape(self.title)}</b><table>{rows}</table>"


class ExactFacts(Facts):
    """Exact accuracy, which the guarantee does not cover."""

    title = "Exact: not covered by the guarantee, as private as the data"

    def _repr_html_(self) -> str:
        rows = [
            {"of": " · ".join(names), "value": value, "range": span} for names, value, span in _leaves(self["metrics"])
        ]
        return f"<b>{escape(self.title)}</b>{Table(rows)._repr_html_()}"


def _leaves(node: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float, str]]:
    """All numbers of nested metrics, each with the names leading to it, and its interval if it has one."""
    if not isinstance(node, dict):
        yield names, float(node), ""
    elif "value" in node:
        yield names, float(node["value"]), f"{plain(node['low'])} – {plain(node['high'])}" if "low" in node else ""
    else:
        for name, part in node.items():
            yield from _leaves(part, (*names, str(name)))


class PlanFacts(Facts):
    """A plan: all its numbers as a dict; a notebook shows the most important ones."""

    def _repr_html_(self) -> str:
        from dpformer.runs.estimate import plan_rows

        shown = Facts(plan_rows(self))
        notes = "".join(f"<p>Note: {escape(note)}</p>" for note in self["notes"])
        return f"{shown._repr_html_()}{notes}"


class Card(str):
    """A card as text; a notebook shows a model card without its metadata."""

    def _repr_markdown_(self) -> str:
        _, dashes, rest = self.removeprefix("---\n").partition("\n---\n")
        return rest if dashes and self.startswith("---\n") else f"```yaml\n{self}```"


class Statement(dict[str, Any]):
    """The privacy statement of a run."""

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{escape(word)}</p>" for word in self["words"])
        gaps = "".join(f"<li>{escape(word)}</li>" for word in self["not_covered"])
        budget = "not private"
        if self["epsilon"] is not None:
            budget = f"ε = {round_up(self['epsilon'])}, δ = {one_in(self['delta'])}"
        return (
            f"<p><b>{escape(self['headline'])}</b></p><p>{budget}, {self['users']:,} in "
            f"total.</p>{words}<details><summary>What is not covered</summary><ul>{gaps}</ul></details>"
        )

    def __repr__(self) -> str:
        return "\n".join([self["headline"], *self["words"]])


def _cell(value: Any) -> str:
    shown = plain(value) if isinstance(value, float) else str(value)
    return f"<td style='{STYLE}'>{escape(shown)}</td>"
