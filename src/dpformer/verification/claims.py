"""The claims of a statement, one by one: checked, contradicted, or not checked and what would check them.

`verify` makes many small checks. What a reader wants to know is which *sentence* of the statement they support. Each
check is made under the claim that it supports, and a claim counts as checked only if all its checks were made and held.
A replay repeats the whole run, so it settles every claim about how the released numbers came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpformer.accounting.units import unit_of
from dpformer.findings import Finding
from dpformer.queries.registry import query_of

REPLAY = "replay"
STATEMENT, FILES, DATA, MODEL = "arithmetic", "published files", "data", "model"
RANDOMNESS, SECRETS, PUBLISHER = "randomness", "secrets", "publisher"
BY_REPLAY = "verify --replay, with the data and the key of the run"
BY_DATA = "verify --data LOG"


@dataclass(frozen=True)
class Claim:
    """A sentence that the statement makes, and what was looked at for it."""

    name: str
    sentence: str
    findings: tuple[Finding, ...]
    would_check: str  # what it takes, if it was not checked

    @property
    def ok(self) -> bool | None:
        """Checked and right, contradicted, or (None) not checked."""
        if any(finding.ok is False for finding in self.findings):
            return False
        return True if self.findings and all(finding.ok for finding in self.findings) else None

    @property
    def how(self) -> str:
        """What checked it, what contradicts it, or what would check it."""
        if self.ok is None:
            return f"not checked: {self.would_check}"
        kind = "checked by" if self.ok else "contradicted by"
        return f"{kind} {', '.join(finding.name for finding in self.findings if finding.ok is self.ok)}"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "claim": self.sentence, "ok": self.ok, "how": self.how}


@dataclass(frozen=True)
class Verification:
    """What `verify` found: the claims of the statement, what has to be assumed, and every single check."""

    headline: str
    findings: tuple[Finding, ...]
    claims: tuple[Claim, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the statement; that does not make it true (`verified`)."""
        return all(finding.ok is not False for finding in self.findings)

    @property
    def verified(self) -> bool:
        """Whether the run was repeated, and everything released came out again."""
        return self.passed and any(finding.name == REPLAY and finding.ok for finding in self.findings)

    @property
    def not_checked(self) -> list[str]:
        """The checks that could not be made."""
        return [finding.name for finding in self.findings if finding.ok is None]

    @property
    def verdict(self) -> str:
        """One sentence, which never sounds like more than was checked."""
        if not self.passed:
            return "Verification failed: the run does not match its privacy statement."
        left = [claim.name for claim in self.claims if claim.ok is None]
        open_claims = f" Not checked: {'; '.join(left)}." if left else ""
        if not self.claims:
            return "The run claims no privacy; nothing that was checked contradicts it."
        if not self.verified:
            return f"Nothing contradicts the statement, but that the model is private is NOT VERIFIED.{open_claims}"
        return f"Replayed: config, data and key give exactly what was released.{open_claims} The rest is assumed."

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "verified": self.verified,
            "verdict": self.verdict,
            "headline": self.headline,
            "claims": [claim.to_dict() for claim in self.claims],
            "assumed": list(self.assumed),
            "not_checked": self.not_checked,
            "findings": [finding.to_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class Drafted:
    """A claim before its findings are known."""

    name: str
    sentence: str
    needs: str  # what would check it
    replayed: bool = False  # a replay that came out the same settles it
    alone: bool = False  # and nothing else does

    def with_findings(self, findings: Sequence[Finding], replay: Finding) -> Claim:
        if self.alone:
            findings = [*findings, replay]
        elif self.replayed and replay.ok:
            findings = [*(finding for finding in findings if finding.ok is not None), replay]
        return Claim(self.name, self.sentence, tuple(findings), self.needs)


def claims(facts: Mapping[str, Any], found: Mapping[str, Sequence[Finding]]) -> tuple[Claim, ...]:
    """The claims of a statement, each with what was found for it.

    Args:
        facts: the statement.
        found: findings by the name of the claim that they support; the replay's, if there was one, under `REPLAY`.
    """
    if not facts["private"]:
        return ()
    not_made = Finding(REPLAY, None, "not asked for")
    replay = next((finding for finding in found.get(REPLAY, ()) if finding.name == REPLAY), not_made)
    drafted = [*_of_the_folder(facts), *_of_the_queries(facts), _of_the_model(facts), *_of_whoever_made_it()]
    return tuple(one.with_findings(found.get(one.name, ()), replay) for one in drafted)


def _of_the_folder(facts: Mapping[str, Any]) -> list[Drafted]:
    unit = unit_of(facts["unit"])
    return [
        Drafted(
            STATEMENT,
            f"ε = {facts['epsilon']:.6g} at δ = {facts['delta']:.3g} follows from the ledger, the ledger is what "
            "config.toml asks for, and every sentence of the statement follows from them",
            "a sound statement",
        ),
        Drafted(
            FILES,
            "the published files are those of the statement and hold nothing that it does not name",
            "verify --catalog FILE",
            replayed=True,
        ),
        Drafted(DATA, f"it is about this data, of {facts['users']:,} {unit.plural}", BY_DATA, replayed=True),
    ]


def _of_the_queries(facts: Mapping[str, Any]) -> list[Drafted]:
    """That the noise is there; whether it is the noise of the key, only a replay can tell."""
    unit = unit_of(facts["unit"]).name
    return [
        Drafted(
            size_of_noise(event["label"]),
            f"{event['label']}: noise of deviation {event['noise_multiplier']:.4g} was added where one {unit} adds at "
            "most 1",
            BY_DATA,
            replayed=True,
        )
        for event in facts["events"]
        if query_of(event["label"]) is not None
    ]


def _of_the_model(facts: Mapping[str, Any]) -> Drafted:
    if not facts["steps"]:
        return Drafted(MODEL, "the model is made of the released numbers and of nothing else", BY_DATA, replayed=True)
    unit = unit_of(facts["unit"])
    return Drafted(
        MODEL,
        f"the weights come from {facts['steps']:,} steps, in each of which {unit.plural} were sampled at rate "
        f"{facts['sample_rate']:.4g} and bounded by {facts['clip_norm']:g}, with noise of "
        f"{facts['noise_multiplier']:.4g} times that; nothing else was written into them",
        BY_REPLAY,
        alone=True,
    )


def _of_whoever_made_it() -> list[Drafted]:
    return [
        Drafted(
            RANDOMNESS,
            "sampling and noise are those of one secret key, to which the statement commits",
            BY_REPLAY,
            alone=True,
        ),
        Drafted(SECRETS, "no key was left behind in the folder", "the whole run folder"),
        Drafted(PUBLISHER, "whoever has a certain key published it", "verify --key PUBLIC"),
    ]


def size_of_noise(label: str) -> str:
    """The name of the claim that a query has its noise."""
    return f"size of the noise of {label}"


def assumptions(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What the statement rests on and no check of a run folder can show."""
    if not facts["private"]:
        return ()
    unit = unit_of(facts["unit"])
    given = f", and {facts['given']}" if "given" in facts else ""
    found = [
        f"One id is one {unit.name}: whoever has several is protected id by id.",
        f"The number of {unit.plural}{given} may be known to everybody, and so may catalogue and config.",
        "The key was drawn at random by the operating system, and no run was made again until its outcome pleased.",
        "The dpformer that is installed does what its documentation says; `dpformer audit` attacks it.",
    ]
    if "budget" not in facts:
        found.append(f"Nothing else was released of these {unit.plural}, and no choice was made by results on them.")
    return tuple(found)
