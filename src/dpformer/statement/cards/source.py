"""The sources of cards: the statement of a run, its owner's words, and an audit, if there was one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpformer.errors import DpformerError
from dpformer.files import read_text
from dpformer.format_number import plain
from dpformer.statement.deployment import Deployment

if TYPE_CHECKING:
    from dpformer.runs.run import Run

AUDIT = "audit.json"  # in the run folder; `dpformer audit RUN` writes it


@dataclass(frozen=True)
class CardSource:
    """Everything that a card says."""

    facts: dict[str, Any]  # the privacy statement
    deployment: Deployment
    audit: dict[str, Any] | None = None
    budget: str = ""  # the remaining budget, according to a ledger
    text: bool = False  # a language model
    items: int | None = None

    @classmethod
    def of(cls, run: Run, deployment: Deployment | None = None, budget: str = "") -> CardSource:
        """The source for a finished run; `deployment` replaces the run's own section; `budget`: see `budget_left`."""
        return cls(
            run.statement,
            deployment or run.config.deployment or Deployment(),
            read_audit(run.folder / AUDIT, run.statement),
            budget,
            run.config.task == "lm",
            len(run.release.vocabulary),
        )

    @property
    def remaining(self) -> str:
        """The remaining budget in words."""
        return self.budget or self.facts.get("nist_sp_800_226", {}).get("remaining_budget", "unknown")

    @property
    def audited(self) -> str:
        """The outcome of an audit in one sentence."""
        if self.audit is None:
            return "not audited"
        return f"{'passed' if self.audit['passed'] else 'FLAGGED'}. {self.audit['verdict']}"

    @property
    def persons(self) -> str:
        """Whether ids are persons, in one sentence; empty if unknown."""
        said, what = self.deployment.ids_are_persons, self.deployment.ids
        if said is None:
            return f"A user id is {what}." if what else ""
        words = "one person" if said else "not one person: someone with several ids is protected id by id"
        return f"A user id is {words}" + (f" ({what})." if what else ".")


def read_audit(path: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """The audit stored in a run folder; one of other settings than the statement's is refused."""
    if not path.is_file():
        return None
    try:
        found = json.loads(read_text(path))
        seen = {one["of"]: float(one["noise_multiplier"]) for one in found["mechanisms"]}
        kinds = {"passed": bool, "verdict": str, "of": str}
        if any(type(found[name]) is not kind for name, kind in kinds.items()):
            raise ValueError("its fields have other types")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DpformerError(f"{path} is not an audit: {' '.join(str(error).split())[:200]}") from None
    for event in facts["events"]:
        noise = seen.get(event["label"])
        if noise is None or not math.isclose(noise, event["noise_multiplier"], rel_tol=1e-9):
            what = "has no" if noise is None else f"has noise multiplier {plain(noise)}, unlike this run, for its"
            raise DpformerError(
                f"{path} {what} {event['label']}: audit the run again with dpformer audit {path.parent}"
            )
    return dict(found)
