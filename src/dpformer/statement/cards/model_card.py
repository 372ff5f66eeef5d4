"""The model card: README.md with metadata that the Hugging Face hub reads, and the statement in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpformer.evaluation import metrics
from dpformer.files import write_text
from dpformer.statement.cards.source import CardSource
from dpformer.statement.cards.yaml import dump
from dpformer.statement.deployment import Deployment
from dpformer.statement.sp800_226 import NAME

TAG = "differential_privacy"
BASE = """This model was trained with [dpformer](https://pypi.org/project/dpformer). The full, machine-readable privacy
statement is in [privacy.json](privacy.json)."""
OWNER = {  # sections from the owner's words
    "intended_use": "Intended use",
    "access": "Access",
    "justification": "Why this ε",
}
ASKED = {  # the statement's answers to NIST, in the order of the card
    "trust_model": "Trust model",
    "variant": "Variant",
    "unit": "Unit",
    "releases": "Releases",
    "data_source": "Data source",
    "pre_processing": "Pre-processing",
    "tuning": "Tuning",
    "post_processing": "Post-processing",
    "floating_point": "Floating point",
    "side_channels": "Side channels",
}


def write_card(folder: Path, facts: dict[str, Any], *, library: str = "transformers") -> None:
    """Write privacy.json and a card beside a saved model; an existing card keeps its metadata, plus our tag."""
    write_text(folder / "privacy.json", json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    source = CardSource(facts, Deployment(), text=True)
    path = folder / "README.md"
    metadata = _kept(path) if path.is_file() else {"library_name": library, "tags": [TAG]}
    write_text(path, model_card(source, metadata))


def model_card(source: CardSource, metadata: dict[str, Any] | None = None) -> str:
    """The card: metadata between lines of dashes, then headline, meaning, data, what is not covered."""
    facts, said = source.facts, source.deployment
    parts = [
        f"---\n{dump(metadata or _metadata(source))}---",
        f"# {_line(said.name or 'Model trained with differential privacy')}",
        f"**{facts['headline']}**",
        _escaped(said.description),
        _published(said),
        BASE,
        *[f"## {title}\n\n{_escaped(getattr(said, name))}" for name, title in OWNER.items() if getattr(said, name)],
        "## What it means\n\n" + "\n\n".join(facts["words"]),
        "## The data\n\n" + _listed([*_period(source), *facts["data"]]),
        _table(source),
        "## Not covered\n\n" + _listed(facts["not_covered"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(source: CardSource) -> dict[str, Any]:
    said, released = source.deployment, source.facts.get("metrics")
    found: dict[str, Any] = {
        "library_name": "dpformer",
        "license": said.license,
        "pipeline_tag": "text-generation" if source.text else None,
        "tags": [TAG, "language-model" if source.text else "recommendation"],
    }
    if released is not None:
        labels = [(metric.label(), metric.heading()) for metric in metrics.released()]
        values = [{"type": label, "value": released[label], "name": heading} for label, heading in labels]
        data = {"type": "private", "name": said.data_period or "private"}
        found["model-index"] = [
            {
                "name": said.name or "dpformer",
                "results": [{"task": {"type": "other", "name": "next item"}, "dataset": data, "metrics": values}],
            }
        ]
    return found


def _kept(path: Path) -> dict[str, Any]:
    """The metadata of an existing card, read by the hub's own package, with our tag."""
    from huggingface_hub import ModelCard

    data = dict(ModelCard.load(path).data.to_dict())
    return {**data, "tags": [*(tag for tag in (data.get("tags") or []) if tag != TAG), TAG]}


def _published(said: Deployment) -> str:
    """Publisher and date in one line."""
    by = f"by {_line(said.curator)}" if said.curator else ""
    on = f"on {said.date.isoformat()}" if said.date else ""
    return f"Published {' '.join(part for part in (by, on) if part)}." if by or on else ""


def _period(source: CardSource) -> list[str]:
    said = source.deployment
    period = [f"The data is from {_line(said.data_period)}."] if said.data_period else []
    return period + ([_line(source.persons)] if source.persons else [])


def _table(source: CardSource) -> str:
    """The statement's answers to the questions of NIST SP 800-226."""
    answers = source.facts.get(NAME, {})
    rows = [(title, answers[name]) for name, title in ASKED.items() if name in answers]
    rows += [("Remaining budget", source.remaining), ("Audit", source.audited)]
    table = "\n".join(f"| {name} | {_line(value)} |" for name, value in rows)
    return f"## For assessors (NIST SP 800-226)\n\n| | |\n| --- | --- |\n{table}"


def _listed(sentences: list[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _line(text: str | None) -> str:
    """One line, which cannot end a table cell."""
    return " ".join(_escaped(text).split()).replace("|", "\\|")


def _escaped(text: str | None) -> str:
    """Words of the owner: any Markdown, but no HTML."""
    return (text or "").replace("<", "&lt;")
