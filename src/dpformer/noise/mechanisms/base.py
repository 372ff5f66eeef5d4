"""What a mechanism is: who may be in which step, how noise is correlated, what that costs, and the words for it.

With z_t independent standard normal noise, step t adds y_t, where C·y = z for the lower triangular Toeplitz matrix C
whose first column is `coefficients()`, c_0 … c_{b−1}. Users are dealt by chance into `groups` ≥ b groups that take
turns, one a step, so that a user takes part at most once in any b steps, and ‖c‖ ≤ 1. Then every time a user takes part
costs one Gaussian release of sensitivity 1 (banded.py has the argument), and `event` is to count at least those.

A new mechanism is a file with a subclass of `Noise`, a frozen dataclass whose fields are its settings and are named
after its options, and a subclass of `PoissonGaussian` with the same fields; `@register` makes it known to samplers,
optimizer, ledger, statement, report, verification and audit. Only an option of `dpformer train` is a field of `Config`
besides.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np

from dpformer.accounting.arguments import whole
from dpformer.accounting.events import PoissonGaussian
from dpformer.accounting.units import UnitOfPrivacy
from dpformer.format_number import plain


@dataclass(frozen=True)
class Noise(ABC):
    """The noise of all steps of training together. Its size, σ, is not part of it."""

    event_type: ClassVar[type[PoissonGaussian]]

    def __post_init__(self) -> None:
        """A user may be hidden by no less noise than is accounted for, whatever the mechanism."""
        c = self.coefficients()
        if c.ndim != 1 or not len(c) or not c[0] > 0 or not np.linalg.norm(c) <= 1:
            raise ValueError(f"the coefficients of {self.name} must begin above 0 and have a norm of at most 1")
        if self.groups < len(c):
            raise ValueError(f"{self.name} is correlated over {len(c)} steps and needs as many groups of users")

    # Users and noise.

    @property
    @abstractmethod
    def groups(self) -> int:
        """Groups of users that take turns; 1: everybody may be in every step."""

    @abstractmethod
    def coefficients(self) -> np.ndarray:
        """(b,) c, of norm at most 1; [1] if the noise of every step is independent."""

    @cached_property
    def correlated(self) -> bool:
        """Whether the noise of a step depends on that of steps before."""
        return len(self.coefficients()) > 1

    def turn(self, step: int) -> int:
        """The group of users from which a step draws."""
        return step % self.groups

    def step_rate(self, sample_rate: float) -> float:
        """How likely a user takes part in a step of their group: q of all steps is groups·q of those."""
        rate = self.groups * sample_rate
        if not 0 < rate <= 1 + 1e-12:
            raise ValueError(
                f"{self.groups} groups of users at sample rate {sample_rate:g} are {rate:.4g} of all users a step; it "
                f"must be at most 1: lower {' or '.join([*self.settings(), 'the batch'])}"
            )
        return min(1.0, rate)

    def sum_deviation(self, steps: int) -> float:
        """Standard deviation of the noise in the sum of all steps, in units of σ; √steps if it is independent.

        C·y = z in generating functions: prefix sums of y are z through 1 / ((1 − x)·Σ c_k x^k).
        """
        c = self.coefficients()
        inverse = np.zeros(whole("steps", steps, 1))  # the first column of C⁻¹
        inverse[0] = 1 / c[0]
        for t in range(1, steps):
            reach = min(t, len(c) - 1)
            inverse[t] = -np.dot(c[1 : reach + 1], inverse[t - reach : t][::-1]) / c[0]
        return float(np.linalg.norm(np.cumsum(inverse)))

    def step_deviation(self, steps: int) -> float:
        """Deviation, in units of σ, of independent noise a step that would leave as much in the sum of all steps."""
        return self.sum_deviation(steps) / math.sqrt(steps) if self.correlated else 1.0

    # What it costs.

    def event(
        self, noise_multiplier: float, sample_rate: float, steps: int, *, label: str = "", private: bool = True
    ) -> PoissonGaussian:
        """Steps of training with this noise."""
        settings: dict[str, Any] = self.settings()
        event = self.event_type(noise_multiplier, sample_rate, steps, label=label, private=private, **settings)
        if event.rate < self.step_rate(event.sample_rate) or event.compositions < -(-event.steps // self.groups):
            raise ArithmeticError(f"the event of {self.name} counts users less often than they take part")
        return event

    # Settings.

    def settings(self) -> dict[str, Any]:
        """Its fields, as they stand in states, plans, statements and events."""
        return asdict(self)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Noise | None:
        """The mechanism with these settings among others; None if they are not about this kind."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: settings[name] for name in names}) if names and set(names) <= set(settings) else None

    @property
    def choice(self) -> str:
        """How it was asked for, at the beginning of a refusal: "bands is 4"."""
        return " and ".join(f"{name} is {value}" for name, value in self.settings().items())

    # Words.

    @property
    @abstractmethod
    def name(self) -> str:
        """What the noise is: "noise correlated over 8 steps"."""

    @property
    @abstractmethod
    def sampler(self) -> str:
        """How users are drawn, for the field of a statement."""

    @abstractmethod
    def sentence(self, facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        """How training touched the data; `facts` are those of a statement."""

    @abstractmethod
    def drawn(self, unit: UnitOfPrivacy) -> str:
        """When noise and users are drawn anew, for a report."""

    def rows(self, sample_rate: float, unit: UnitOfPrivacy) -> list[tuple[str, str]]:
        """What a table of σ, C and q has to say besides: names and values."""
        return []


def bound_in_words(facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
    """Part of a `sentence`: what one user can add."""
    return f"what one {unit.name} could add was bounded by {plain(facts['clip_norm'])}"


def deviation_in_words(facts: Mapping[str, Any]) -> str:
    """Part of a `sentence`: σ·C."""
    return plain(facts["noise_multiplier"] * facts["clip_norm"])


MECHANISMS: list[type[Noise]] = []
Kind = TypeVar("Kind", bound=type[Noise])


def register(kind: Kind) -> Kind:
    """Makes a mechanism known by its settings, whose names must be its own."""
    mine = {field.name for field in fields(kind)}
    for other in MECHANISMS:
        if taken := mine & {field.name for field in fields(other)}:
            raise ValueError(f"{kind.__name__} and {other.__name__} both have the setting {min(taken)}")
    MECHANISMS.append(kind)
    return kind
