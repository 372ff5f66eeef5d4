"""The interface of a mechanism: who may be in which step, how noise is correlated, its cost, and its description.

With z_t independent standard normal noise, step t adds y_t, where C·y = z for the lower triangular Toeplitz matrix C
whose first column is `coefficients()`, c_0 … c_{b−1}. Users are dealt at random into `groups` ≥ b groups, used in
rotation, one per step, so that a user takes part at most once in any b steps, and ‖c‖ ≤ 1. Then every participation
costs one Gaussian release of sensitivity 1 (see banded.py), and `event` must count at least those.

A new mechanism is a file with a subclass of `Noise`, a frozen dataclass whose fields are its settings, named after its
options, and a subclass of `PoissonGaussian` with the same fields; `@register` makes it known to samplers, optimizer,
ledger, statement, report, verification and audit. In addition, only an option of `dpformer train` needs a field of
`Config`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from dpformer.accounting.arguments import whole
from dpformer.accounting.events import PoissonGaussian
from dpformer.accounting.units import UnitOfPrivacy
from dpformer.format_number import plain

if TYPE_CHECKING:
    from dpformer.noise.randomness import SecureRandom


@dataclass(frozen=True)
class Noise(ABC):
    """The noise of all training steps together. Its size, σ, is not part of it."""

    event_type: ClassVar[type[PoissonGaussian]]

    def __post_init__(self) -> None:
        """Check that no user is hidden by less noise than is accounted for, whatever the mechanism."""
        c = self.coefficients()
        if c.ndim != 1 or not len(c) or not c[0] > 0 or not np.linalg.norm(c) <= 1:
            raise ValueError(f"the coefficients of {self.name} must begin above 0 and have a norm of at most 1")
        if self.groups < len(c):
            raise ValueError(f"{self.name} is correlated over {len(c)} steps and needs as many groups of users")

    # Users and noise.

    @property
    @abstractmethod
    def groups(self) -> int:
        """The number of groups of users used in rotation; 1: all users may be in every step."""

    @abstractmethod
    def coefficients(self) -> np.ndarray:
        """(b,) c, of norm at most 1; [1] if the noise of every step is independent."""

    @cached_property
    def correlated(self) -> bool:
        """Whether the noise of a step depends on that of earlier steps."""
        return len(self.coefficients()) > 1

    def turn(self, step: int) -> int:
        """The group of users from which a step draws."""
        return step % self.groups

    def step_rate(self, sample_rate: float) -> float:
        """The probability that a user takes part in a step of their group: groups·q, if q is over all steps."""
        rate = self.groups * sample_rate
        if not 0 < rate <= 1 + 1e-12:
            raise ValueError(
                f"{self.groups} groups of users at sample rate {sample_rate:g} are {rate:.4g} of all users per step, "
                f"which must be at most 1: lower {' or '.join([*self.settings(), 'the batch'])}"
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
        """Standard deviation, in units of σ, of independent noise per step with the same total."""
        return self.sum_deviation(steps) / math.sqrt(steps) if self.correlated else 1.0

    def check_users(self, n: int) -> None:
        """Raise if it is for another number of users."""
        return None

    def keep(self, users: np.ndarray, step: int, random: SecureRandom) -> np.ndarray:
        """Those of the drawn users, ascending, who take part in a step: all, unless batches are bounded."""
        return users

    # Cost.

    def event(
        self, noise_multiplier: float, sample_rate: float, steps: int, *, label: str = "", private: bool = True
    ) -> PoissonGaussian:
        """Training steps with this noise."""
        settings: dict[str, Any] = self.settings()
        event = self.event_type(noise_multiplier, sample_rate, steps, label=label, private=private, **settings)
        if event.rate < self.step_rate(event.sample_rate) or event.compositions < -(-event.steps // self.groups):
            raise ArithmeticError(f"the event of {self.name} counts fewer participations than there are")
        return event

    # Settings.

    def settings(self) -> dict[str, Any]:
        """Its fields, as they appear in states, plans, statements and events."""
        return asdict(self)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Noise | None:
        """The mechanism with these settings among others; None if they belong to another kind."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: settings[name] for name in names}) if names and set(names) <= set(settings) else None

    @property
    def choice(self) -> str:
        """The setting that selected it, for the start of an error: "bands is 4"."""
        return " and ".join(f"{name} is {value}" for name, value in self.settings().items())

    # Descriptions.

    @property
    @abstractmethod
    def name(self) -> str:
        """The noise in words: "noise correlated over 8 steps"."""

    @property
    @abstractmethod
    def sampler(self) -> str:
        """How users are drawn, for the statement."""

    @abstractmethod
    def sentence(self, facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        """How training used the data; `facts` are those of a statement."""

    @abstractmethod
    def drawn(self, unit: UnitOfPrivacy) -> str:
        """When noise and users are drawn, for a report."""

    def rows(self, sample_rate: float, unit: UnitOfPrivacy) -> list[tuple[str, str]]:
        """Additional rows for a table of σ, C and q: names and values."""
        return []


def bound_in_words(facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
    """Part of a `sentence`: the bound on one user's contribution."""
    return f"the contribution of one {unit.name} was bounded by {plain(facts['clip_norm'])}"


def deviation_in_words(facts: Mapping[str, Any]) -> str:
    """Part of a `sentence`: σ·C."""
    return plain(facts["noise_multiplier"] * facts["clip_norm"])


MECHANISMS: list[type[Noise]] = []
Kind = TypeVar("Kind", bound=type[Noise])


def register(kind: Kind) -> Kind:
    """Make a mechanism known by its settings, whose names must be unique."""
    mine = {field.name for field in fields(kind)}
    for other in MECHANISMS:
        if taken := mine & {field.name for field in fields(other)}:
            raise ValueError(f"{kind.__name__} and {other.__name__} both have the setting {min(taken)}")
    MECHANISMS.append(kind)
    return kind
