"""Cards and other documents in a run folder: people read them instead of the statement, so they must not say more.

A card is a function of statement, config and audit.json, so it is written again and compared. Owners may edit it; then
nobody can tell whether its sentences are true, and it is reported as not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpformer.errors import DpformerError
from dpformer.files import read_text, regular
from dpformer.findings import Finding
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.statement.cards import CardSource, assessment, model_card, registry_entry
from dpformer.statement.cards.source import AUDIT, read_audit
from dpformer.statement.deployment import Deployment

NAME = "documents"
MOST = 2**22  # bytes
CARDS: dict[str, Callable[[CardSource], str]] = {
    "README.md": model_card,
    "dpia.md": assessment,
    "opendp.yaml": registry_entry,
}


def documents(folder: RunFolder, config: Config, facts: dict[str, Any], items: Callable[[], int]) -> Finding:
    """Whether the cards are those of the statement; a model card without its headline contradicts it."""
    present = [name for name in CARDS if (folder.path / name).exists()]
    other = [AUDIT] if (folder.path / AUDIT).exists() else []
    for name in present:
        if problem := regular(folder.path / name, MOST):
            return Finding(NAME, False, problem)
        text = read_text(folder.path / name)
        if name == "README.md" and facts["headline"] not in text:
            return Finding(NAME, False, f"{name} does not state the headline of the statement")
        if text != _again(CARDS[name], folder, config, facts, items):
            other.insert(0, name)
    if other:
        return Finding(
            NAME, None, f"{', '.join(other)}: not checked, because only their author knows whether they are true"
        )
    return Finding(NAME, True, f"{', '.join(present)}: as dpformer card writes it" if present else "none")


def _again(
    made: Callable[[CardSource], str],
    folder: RunFolder,
    config: Config,
    facts: dict[str, Any],
    items: Callable[[], int],
) -> str | None:
    """The card that `dpformer card` writes; None if it writes none."""
    try:
        audit = read_audit(folder.path / AUDIT, facts)
        said = config.deployment or Deployment()
        return made(CardSource(facts, said, audit, text=config.task == "lm", items=items()))
    except DpformerError:
        return None
