"""The result of an audit: the claim, the lower bound and every check; as a table, JSON or a plot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.events import Event
from dpformer.errors import DpformerError, MissingExtra
from dpformer.files import replacing
from dpformer.verification.audit.bound import Guesses, any_mechanism, epsilon_at, guess, noise_left
from dpformer.verification.audit.checks import Check, told_apart
from dpformer.verification.audit.observation import Mechanism

ASSUMES = "different canaries are guessed wrong independently of one another, as with independent noise"


@dataclass(frozen=True)
class Part:
    """One audited mechanism, run on canaries."""

    of: str  # training, or the label of a query
    event: Event  # its claim, as an event of the ledger
    mechanism: Mechanism
    scores: np.ndarray  # (canaries,) log-likelihood ratios of "takes part" to "does not"
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Audit:
    """The joint claim about some mechanisms, and the observations. The same canaries go through all of them."""

    parts: tuple[Part, ...]
    delta: float
    epsilon_claimed: float  # of all parts together, at delta
    epsilon_lower: float  # with `confidence`, for this kind of mechanism (`bound`)
    epsilon_lower_any: float  # with `confidence`, for any mechanism (Steinke et al. 2023)
    noise_left: float  # the largest share of the claimed noise that is consistent with the guesses
    confidence: float
    guesses: Guesses
    checks: tuple[Check, ...]
    seconds: float
    scores: np.ndarray  # (canaries,) scores of all parts together
    member: np.ndarray  # (canaries,) bool

    @property
    def of(self) -> str:
        """Names of the audited mechanisms."""
        return ", ".join(part.of for part in self.parts)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of the first part; most audits have one."""
        return self.parts[0].mechanism

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the claim, beyond chance."""
        return all(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """A one-sentence verdict."""
        failed = [check.name for check in self.checks if not check.passed]
        if failed:
            return f"FLAGGED: the pipeline does not match its claim ({'; '.join(failed)})."
        seen = f"ε of {self.of} is at least {self.epsilon_lower:.3g} with {self.confidence:.0%} confidence"
        if self.epsilon_lower > self.epsilon_claimed:
            chance = f"this happens to a correct build in {1 - self.confidence:.0%} of audits: repeat it"
            return f"{seen}, just above the claim of {self.epsilon_claimed:.3g}; {chance}."
        return f"Consistent with the claim: {seen}, and the claim is {self.epsilon_claimed:.3g}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without the scores."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "of": self.of,
            "mechanisms": [{"of": part.of, **part.mechanism.to_dict()} for part in self.parts],
            "delta": self.delta,
            "epsilon_claimed": self.epsilon_claimed,
            "epsilon_lower": self.epsilon_lower,
            "epsilon_lower_any": self.epsilon_lower_any,
            "assumes": {"epsilon_lower": ASSUMES, "epsilon_lower_any": "nothing"},
            "noise_left": self.noise_left if np.isfinite(self.noise_left) else None,
            "confidence": self.confidence,
            "guesses": asdict(self.guesses),
            "checks": [check.to_dict() for check in self.checks],
            "seconds": round(self.seconds, 1),
        }

    def plot(self, path: str | Path) -> None:
        """Plot the scores of members and non-members, and the claimed and shown ε; SVG or PNG by suffix."""
        path = Path(path)
        if path.suffix not in (".svg", ".png"):
            raise DpformerError(f"{path.name}: unsupported image format; use .svg or .png")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise MissingExtra("matplotlib", "report") from None
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[2, 1])
        low, high = np.quantile(self.scores, [0.001, 0.999])
        bins = np.linspace(low, high, 60)
        left.hist(self.scores[~self.member], bins, alpha=0.6, color="#4c72b0", label="non-members")
        left.hist(self.scores[self.member], bins, alpha=0.6, color="#dd8452", label="members")
        left.axvline(0, color="black", linewidth=1, linestyle="--")
        left.set(xlabel="log-likelihood ratio of a canary", ylabel="canaries", title="What an attacker can distinguish")
        left.legend(frameon=False)
        names = ["bound, any\nmechanism", f"shown at\n{self.confidence:.0%}", "claimed"]
        values = [self.epsilon_lower_any, self.epsilon_lower, self.epsilon_claimed]
        colours = ["#4c72b0", "#4c72b0", "#55a868" if self.passed else "#c44e52"]
        right.bar_label(right.bar(names, values, color=colours), fmt="%.2f")
        right.set(ylabel="ε", title="passed" if self.passed else "FLAGGED", ylim=(0, 1.15 * max(values)))
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        with replacing(path) as part:
            figure.savefig(part, format=path.suffix[1:], dpi=150)


def conclude(parts: Sequence[Part], member: np.ndarray, delta: float, confidence: float, began: float) -> Audit:
    """Combine all parts for the same canaries: their log-likelihood ratios add up."""
    scores = np.sum([part.scores for part in parts], axis=0)
    claimed = [part.mechanism.event for part in parts]
    guesses = guess(scores, member, confidence)
    left = noise_left(guesses.error_at_most, claimed)
    checks = [check if len(parts) == 1 else replace(check, of=part.of) for part in parts for check in part.checks]
    return Audit(
        parts=tuple(parts),
        delta=delta,
        epsilon_claimed=epsilon_of([part.event for part in parts], delta),
        epsilon_lower=epsilon_at(left, claimed, delta),
        epsilon_lower_any=any_mechanism(scores, member, delta, confidence),
        noise_left=left,
        confidence=confidence,
        guesses=guesses,
        checks=(told_apart(guesses, claimed), *checks),
        seconds=time.monotonic() - began,
        scores=scores,
        member=member,
    )
