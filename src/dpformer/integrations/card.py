"""privacy.json and the model card, beside a saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpformer.files import write_text

TAG = "differential_privacy"
BASE = """This model was trained with [dpformer](https://pypi.org/project/dpformer). What is promised, in full and for
machines, is in [privacy.json](privacy.json)."""


def write_card(folder: Path, facts: dict[str, Any], *, library: str = "transformers") -> None:
    """Writes the statement and a card with its words; a card that is there keeps its metadata, and gets the tag."""
    write_text(folder / "privacy.json", json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "README.md", model_card(facts, _metadata(folder / "README.md", library)))


def model_card(facts: dict[str, Any], metadata: str) -> str:
    """The card: metadata between lines of dashes, then the statement in words."""
    told = "\n\n".join(facts["words"])
    listed = "\n".join(f"- {sentence}" for sentence in facts["data"])
    left = "\n".join(f"- {sentence}" for sentence in facts["not_covered"])
    return (
        f"---\n{metadata}---\n\n# Model trained with differential privacy\n\n**{facts['headline']}**\n\n{BASE}\n\n"
        f"## What it means\n\n{told}\n\n## The data\n\n{listed}\n\n## Not covered\n\n{left}\n"
    )


def _metadata(path: Path, library: str) -> str:
    """YAML of the card, with our tag. Read and written by the hub's own package, which comes with transformers."""
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCard.load(path).data if path.is_file() else ModelCardData(library_name=library)
    tags = [tag for tag in (data.tags or []) if tag != TAG]
    data.tags = [*tags, TAG]
    return f"{data.to_yaml()}\n"
