"""Truncated Poisson sampling: batches of at most a public size, so that shapes of tensors can be fixed.

Each user is drawn with probability q, and if more than `max_batch_size` are drawn, a uniformly random subset of that
size is kept. Who is in a batch is then no longer independent: a user takes the place of another. Poisson accounting
would understate ε, so the event is dp-accounting's for this sampler (arXiv 2508.15089): with τ the probability that
`max_batch_size` or more of the other users are drawn, a step is with probability 1 − τ a Poisson-sampled Gaussian of
sensitivity 1, and else one in which a user replaces another, of sensitivity 2.

**Guarantee** under zero-out adjacency: the number of users is public, and the draw does not depend on the data, so τ is
the same whatever one user's data are. Where the user is drawn and others fill the batch, the sums with and without the
user's data differ from that of a batch without the user by at most 2 (g − v and −v for another user's v).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpformer.accounting.arguments import whole
from dpformer.accounting.events import PoissonGaussian
from dpformer.accounting.units import UnitOfPrivacy
from dpformer.format_number import plain
from dpformer.noise.mechanisms.base import Noise, bound_in_words, deviation_in_words, register

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from dpformer.noise.randomness import SecureRandom


@dataclass(frozen=True)
class TruncatedGaussian(PoissonGaussian):
    """Steps over at most `max_batch_size` of `population` users, drawn at rate `sample_rate`."""

    kind = "truncated_gaussian"
    max_batch_size: int
    population: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_batch_size", "population"):
            self._set(name, whole(name, getattr(self, name), 1))

    def once(self) -> DpEvent:
        if self.max_batch_size >= self.population:  # never truncated
            return super().once()
        import dp_accounting

        return dp_accounting.TruncatedSubsampledGaussianDpEvent(
            self.population, self.rate, self.max_batch_size, self.noise_multiplier
        )


@register
@dataclass(frozen=True)
class Truncated(Noise):
    """Independent noise; batches of at most `max_batch_size` of `population` users, as many as the sampler has."""

    event_type = TruncatedGaussian
    groups = 1
    max_batch_size: int
    population: int

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "population"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        super().__post_init__()

    @classmethod
    def for_rate(cls, population: int, sample_rate: float, deviations: float = 6.0) -> Truncated:
        """The least size that a batch exceeds only by more than this many standard deviations: ε rises by little.

        >>> Truncated.for_rate(100_000, 0.01)
        Truncated(max_batch_size=1189, population=100000)
        """
        mean, variance = population * sample_rate, population * sample_rate * (1 - sample_rate)
        return cls(min(population, math.ceil(mean + deviations * math.sqrt(variance))), population)

    def coefficients(self) -> np.ndarray:
        return np.ones(1)

    def check_users(self, n: int) -> None:
        if n != self.population:
            raise ValueError(f"batches are truncated for {self.population:,} users, but there are {n:,}: give this one")

    def keep(self, users: np.ndarray, step: int, random: SecureRandom) -> np.ndarray:
        """A uniformly random subset: the users of the smallest of as many independent 64-bit words."""
        if len(users) <= self.max_batch_size:
            return users
        words = random.within("truncation").words(len(users), step=step)
        return users[np.sort(np.argsort(words, kind="stable")[: self.max_batch_size])]

    @property
    def name(self) -> str:
        return f"batches of at most {self.max_batch_size:,} users"

    @property
    def sampler(self) -> str:
        return f"Poisson, truncated at random to {self.max_batch_size:,}"

    def sentence(self, facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        return (
            f"Training took {facts['steps']:,} steps. In each, every {unit.name} was drawn independently with "
            f"probability {plain(facts['sample_rate'])}, and if more than {self.max_batch_size:,} were drawn, as many "
            f"of them, chosen at random, took part; {bound_in_words(facts, unit)}, and noise of standard deviation "
            f"{deviation_in_words(facts)} was added to the sum."
        )

    def drawn(self, unit: UnitOfPrivacy) -> str:
        return (
            f"Noise and {unit.plural} are drawn independently in each step; of more than {self.max_batch_size:,}, a "
            "random subset is kept."
        )

    def rows(self, sample_rate: float, unit: UnitOfPrivacy) -> list[tuple[str, str]]:
        return [(f"{unit.plural} in a batch, at most", f"{self.max_batch_size:,}")]
