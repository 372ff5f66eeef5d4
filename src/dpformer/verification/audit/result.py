"""The result of an audit: the claim, the lower bound beside it, and every check; as a table, as JSON, as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.errors import DpformerError, MissingExtra
from dpformer.files import replacing
from dpformer.verification.audit.bound import Guesses
from dpformer.verification.audit.checks import Check
from dpformer.verification.audit.observation import Mechanism


@dataclass(frozen=True)
class Audit:
    """What was claimed of training, and what canaries showed."""

    mechanism: Mechanism
    delta: float
    epsilon_claimed: float  # of training alone, at delta
    epsilon_lower: float  # with `confidence`, under the trade-off of the claimed kind of mechanism
    epsilon_lower_any: float  # with `confidence`, whatever the mechanism
    effective_noise: float
    confidence: float
    guesses: Guesses
    checks: tuple[Check, ...]
    seconds: float
    scores: np.ndarray  # (canaries,)
    member: np.ndarray  # (canaries,) bool
    of: str = "training"  # what was audited

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against the claim, beyond chance."""
        return all(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """One sentence."""
        failed = [check.name for check in self.checks if not check.passed]
        if failed:
            return f"FLAGGED: the pipeline does not do what is claimed ({'; '.join(failed)})."
        seen = f"ε of {self.of} is at least {self.epsilon_lower:.3g} with {self.confidence:.0%} confidence"
        if self.epsilon_lower > self.epsilon_claimed:
            chance = f"a correct build shows this in {1 - self.confidence:.0%} of audits: repeat it"
            return f"{seen}, just above the claim of {self.epsilon_claimed:.3g}; {chance}."
        return f"Nothing speaks against the claim: {seen}, and claimed is {self.epsilon_claimed:.3g}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without the scores."""
        finite = self.effective_noise if np.isfinite(self.effective_noise) else None
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "of": self.of,
            "mechanism": self.mechanism.to_dict(),
            "delta": self.delta,
            "epsilon_claimed": self.epsilon_claimed,
            "epsilon_lower": self.epsilon_lower,
            "epsilon_lower_any": self.epsilon_lower_any,
            "effective_noise": finite,
            "confidence": self.confidence,
            "guesses": asdict(self.guesses),
            "checks": [check.to_dict() for check in self.checks],
            "seconds": round(self.seconds, 1),
        }

    def plot(self, path: str | Path) -> None:
        """Scores of canaries that took part and of those that did not, and the two ε; SVG or PNG by the name."""
        path = Path(path)
        if path.suffix not in (".svg", ".png"):
            raise DpformerError(f"{path.name} is no picture that can be drawn: give a name ending in .svg or .png")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise MissingExtra("matplotlib", "report") from None
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[2, 1])
        low, high = np.quantile(self.scores, [0.001, 0.999])
        bins = np.linspace(low, high, 60)
        left.hist(self.scores[~self.member], bins, alpha=0.6, color="#4c72b0", label="did not take part")
        left.hist(self.scores[self.member], bins, alpha=0.6, color="#dd8452", label="took part")
        left.axvline(0, color="black", linewidth=1, linestyle="--")
        left.set(xlabel="log-likelihood ratio of a canary", ylabel="canaries", title="What an attacker can tell")
        left.legend(frameon=False)
        names = ["shown without\nassumptions", f"shown at\n{self.confidence:.0%}", "claimed"]
        values = [self.epsilon_lower_any, self.epsilon_lower, self.epsilon_claimed]
        colours = ["#4c72b0", "#4c72b0", "#55a868" if self.passed else "#c44e52"]
        right.bar_label(right.bar(names, values, color=colours), fmt="%.2f")
        right.set(ylabel="ε", title="passed" if self.passed else "FLAGGED", ylim=(0, 1.15 * max(values)))
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        with replacing(path) as part:
            figure.savefig(part, format=path.suffix[1:], dpi=150)
