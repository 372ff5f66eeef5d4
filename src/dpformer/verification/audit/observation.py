"""The claim under audit and the observations: what training on canaries revealed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dpformer.accounting.events import Event, PoissonGaussian
from dpformer.noise.mechanisms import INDEPENDENT, Noise


@dataclass(frozen=True)
class Mechanism:
    """The claim about training, which is audited."""

    noise_multiplier: float
    sample_rate: float
    steps: int
    clip_norm: float = 1.0
    clipping: str = "normalize"
    noise: Noise = INDEPENDENT

    @property
    def event(self) -> PoissonGaussian:
        """Its cost, as steps with independent noise: a round of all groups counts as one."""
        return PoissonGaussian(self.noise_multiplier, self.claimed.rate, self.claimed.compositions)

    @property
    def claimed(self) -> PoissonGaussian:
        """The same as an event of the ledger."""
        return self.noise.event(self.noise_multiplier, self.sample_rate, self.steps)

    def to_dict(self) -> dict[str, Any]:
        facts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "noise"}
        return facts | self.noise.settings()


@dataclass
class Contribution:
    """The observations at the coordinates of users who took part, o = 1 + σ·N(0, 1) if all is well."""

    total: float = 0.0  # Σ o
    squares: float = 0.0  # Σ (o − 1)²
    count: int = 0

    def add(self, seen: np.ndarray) -> None:
        self.total += float(seen.sum())
        self.squares += float(np.square(seen - 1).sum())
        self.count += len(seen)

    def __add__(self, other: Contribution) -> Contribution:
        return Contribution(self.total + other.total, self.squares + other.squares, self.count + other.count)


@dataclass
class Observation:
    """The results of one run on canaries."""

    mechanism: Mechanism
    member: np.ndarray  # (canaries,) bool
    scores: np.ndarray  # (canaries,) L_j
    noise: np.ndarray  # (T, some) float32: w_tj where no canary takes part, over the claimed noise
    columns: dict[str, np.ndarray]  # columns of that noise by parameter
    inclusion: np.ndarray  # (T, some) bool: which members' histories were read in which step (groups: round)
    once: bool  # no user was in a step twice
    in_turn: bool  # no user was in a round of all groups twice, wherever it begins
    contributions: dict[str, Contribution]  # of members in their own steps, by parameter
    ledger: tuple[Event, ...]  # the events reported by training
    same_batches: bool  # a second process with the same key draws the same batches
    other_data: np.ndarray  # (some,): the first noise after the restart, if one user had been different
    runs: np.ndarray | None  # (2, some): the noise of two runs on the same empty sum; None with a seed
    restart: int  # the step before which training was stopped and resumed
