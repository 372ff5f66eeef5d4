"""Options for privacy: the budget, each query's share of it, and the bound on a user's gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from dpformer.options import Count, Limit, Options, Positive, Share, option

if TYPE_CHECKING:
    from dpformer.noise import Noise


class PrivacyOptions(Options):
    """The section `Privacy`."""

    section: ClassVar[str] = "Privacy"

    epsilon: Annotated[float, Field(gt=0)] = option(5.0, "Total privacy budget ε for the run (inf disables privacy).")
    delta: Annotated[float, Field(gt=0, lt=1)] | None = option(
        None, "δ (default: 1 / (10 · users); with --recipe paper 1 / users)."
    )
    clipping: Literal["normalize", "clip"] = option("normalize", "How each user's gradient is bounded.")
    clip_norm: Positive = option(1.0, "C, the bound on each user's gradient.")
    frequency_share: Share = option(0.01, "Share of the budget for item frequencies.")
    bands: Count = option(
        1, "Number of steps over which noise is correlated, which reduces it in sums of steps; 1 is independent noise."
    )
    warm_start: Share = option(
        0.0,
        "Networks: share of the budget for transition counts that initialise the items; 0 initialises at random. "
        "Counts: a run folder, whose released counts improve those of this run at no cost.",
    )
    previous: Path | None = option(None, "The run folder given by `--warm-start RUN`.")
    items_share: Annotated[float, Field(gt=0, lt=1)] = option(
        0.1, "Networks without a catalogue: share of the budget for the item list and its popularity."
    )
    private_metrics: bool = option(False, "Release noisy accuracy on held-out items at the end, within ε.")
    metrics_share: Share = option(0.01, "Share of the budget for private metrics.")
    seed: Limit | None = option(None, "Seed of a reproducible run, for tests: NOT private.")

    @property
    def private(self) -> bool:
        """Whether noise is added; with a seed it is, but there is no guarantee."""
        return math.isfinite(self.epsilon)

    @property
    def noise(self) -> Noise:
        """How the noise of steps is correlated."""
        from dpformer.noise.mechanisms import noise_of  # torch

        return noise_of(dict(self))

    def check_privacy(self) -> None:
        """Raise ValueError on contradictions within the section."""
        if self.private_metrics and not (self.private and self.metrics_share):
            raise ValueError("private_metrics needs a budget: give a finite epsilon and metrics_share above 0")
        if self.warm_start and not self.private:
            raise ValueError("warm_start needs a budget: give a finite epsilon, or omit it")
        if self.previous is not None and (not self.private or self.seed is not None):
            raise ValueError("warm_start from an earlier run needs a private run: give a finite epsilon, and no seed")
        if self.noise.correlated and not self.private:
            raise ValueError(f"{self.noise.choice}, which applies to networks trained with noise: omit it")
