"""The claims of a statement, one by one: checked, contradicted, or not checked and how they could be.

`verify` makes many small checks. A reader wants to know which *sentence* of the statement they support. Each check is
listed under the claim that it supports, and a claim counts as checked only if all its checks were made and passed.
A replay repeats the entire run, so it settles every claim about how the released numbers were computed.
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
    """One claim of the statement, and its findings."""

    name: str
    sentence: str
    findings: tuple[Finding, ...]
    would_check: str  # how it could be checked, if it was not

    @property
    def ok(self) -> bool | None:
        """Checked and right, contradicted, or (None) not checked."""
        if any(finding.ok is False for finding in self.findings):
            return False
        return True if self.findings and all(finding.ok for finding in self.findings) else None

    @property
    def how(self) -> str:
        """What checked it, what contradicts it, or how it could be checked."""
        if self.ok is None:
            return f"not checked: {self.would_check}"
        kind = "checked by" if self.ok else "contradicted by"
        return f"{kind} {', '.join(finding.name for finding in self.findings if finding.ok is self.ok)}"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "claim": self.sentence, "ok": self.ok, "how": self.how}


@dataclass(frozen=True)
class Verification:
    """The findings of `verify`: claims of the statement, assumptions, and every single check."""

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
        """Whether the run was repeated and everything released was reproduced."""
        return self.passed and any(finding.name == REPLAY and finding.ok for finding in self.findings)

    @property
    def not_checked(self) -> list[str]:
        """The checks that could not be made."""
        return [finding.name for finding in self.findings if finding.ok is None]

    @property
    def verdict(self) -> str:
        """A one-sentence verdict, which never claims more than was checked."""
        if not self.passed:
            return "Verification failed: the run does not match its privacy statement."
        left = [claim.name for claim in self.claims if claim.ok is None]
        open_claims = f" Not checked: {'; '.join(left)}." if left else ""
        if not self.claims:
            return "The run claims no privacy; no check contradicts it."
        if not self.verified:
            return f"Nothing contradicts the statement, but the model's privacy is NOT VERIFIED.{open_claims}"
        return f"Replayed: config, data and key reproduce the release exactly.{open_claims} The rest is assumed."

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
    needs: str  # how it could be checked
    replayed: bool = False  # a replay with the same result settles it
    alone: bool = False  # only a replay settles it

    def with_findings(self, findings: Sequence[Finding], replay: Finding) -> Claim:
        if self.alone:
            findings = [*findings, replay]
        elif self.replayed and replay.ok:
            findings = [*(finding for finding in findings if finding.ok is not None), replay]
        return Claim(self.name, self.sentence, tuple(findings), self.needs)


def claims(facts: Mapping[str, Any], found: Mapping[str, Sequence[Finding]]) -> tuple[Claim, ...]:
    """The claims of a statement, each with its findings.

    Args:
        facts: the statement.
        found: findings by the name of the supported claim; the replay's, if any, under `REPLAY`.
    """
    if not facts["private"]:
        return ()
    not_made = Finding(REPLAY, None, "not requested")
    replay = next((finding for finding in found.get(REPLAY, ()) if finding.name == REPLAY), not_made)
    drafted = [*_of_the_folder(facts), *_of_the_queries(facts), _of_the_model(facts), *_of_whoever_made_it()]
    return tuple(one.with_findings(found.get(one.name, ()), replay) for one in drafted)


def _of_the_folder(facts: Mapping[str, Any]) -> list[Drafted]:
    unit = unit_of(facts["unit"])
    return [
        Drafted(
            STATEMENT,
            f"ε = {facts['epsilon']:.6g} at δ = {facts['delta']:.3g} follows from the ledger, the ledger is what "
            "config.toml requires, and every sentence of the statement follows from them",
            "a consistent statement",
        ),
        Drafted(
            FILES,
            "the published files are those of the statement and contain nothing that it does not name",
            "verify --catalog FILE, for titles; of edited cards and added files only their author knows",
            replayed=True,
        ),
        Drafted(DATA, f"it is about this data, with {facts['users']:,} {unit.plural}", BY_DATA, replayed=True),
    ]


def _of_the_queries(facts: Mapping[str, Any]) -> list[Drafted]:
    """Claims that the noise is present; whether it is the key's noise, only a replay can tell."""
    unit = unit_of(facts["unit"]).name
    return [
        Drafted(
            size_of_noise(event["label"]),
            f"{event['label']}: noise of standard deviation {event['noise_multiplier']:.4g} was added where one "
            f"{unit} contributes at most 1",
            BY_DATA,
            replayed=True,
        )
        for event in facts["events"]
        if query_of(event["label"]) is not None
    ]


def _of_the_model(facts: Mapping[str, Any]) -> Drafted:
    if not facts["steps"]:
        return Drafted(MODEL, "the model follows from the released numbers and nothing else", BY_DATA, replayed=True)
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
            "sampling and noise come from one secret key, to which the statement commits",
            BY_REPLAY,
            alone=True,
        ),
        Drafted(SECRETS, "no key was left behind in the folder", "the whole run folder"),
        Drafted(PUBLISHER, "the owner of a certain key published it", "verify --key PUBLIC"),
    ]


def size_of_noise(label: str) -> str:
    """The name of the claim that a query has its noise."""
    return f"size of the noise of {label}"


def assumptions(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What the statement rests on and a check of a run folder cannot show."""
    if not facts["private"]:
        return ()
    unit = unit_of(facts["unit"])
    given = f", and {facts['given']}" if "given" in facts else ""
    found = [
        f"One id is one {unit.name}: someone with several ids is protected id by id.",
        f"The number of {unit.plural}{given} are public, as are catalogue and config.",
        "The key was drawn at random by the operating system, and no run was repeated until its outcome was "
        "favourable.",
        "The installed dpformer does what its documentation says; `dpformer audit` tests it by attacks.",
    ]
    if "budget" not in facts:
        found.append(
            f"Nothing else was released about these {unit.plural}, and no choice was based on results on them."
        )
    return tuple(found)
