"""The plan: one frozen object ties sampling, clipping, noise and accounting together, before any data is touched.

    q = B / N        the probability that a user is in a batch      (`sample_rate`)
    T = ⌈epochs / q⌉  the number of batches, fixed in advance         (`steps`)
    σ                the least noise with which all touches of the data are (ε, δ)-DP (`noise_multiplier`)

Transition counts (`--model counts`) are one Gaussian release instead of steps: T = 0, and σ is that of the release.

The plan builds its parts, so that they cannot disagree: `sampler()`, `clip`, `optimizer(inner)`.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from dpformer.accounting.accountant import epsilon_of, quiet
from dpformer.accounting.events import Event
from dpformer.clipping import ClipFunction, clip, normalize
from dpformer.noise.mechanisms import INDEPENDENT, Noise, noise_of
from dpformer.sampling import PoissonBatches
from dpformer.training.optimizer import PrivateOptimizer


@dataclass(frozen=True)
class Plan:
    """What a run will do to the data, and its cost. Everything here is public."""

    users: int  # N
    expected_batch_size: float  # B
    steps: int  # T
    epsilon_target: float
    delta: float
    clip_norm: float
    noise_multiplier: float  # of training, on the sum, in units of clip_norm; 0 without privacy
    releases: tuple[Event, ...]  # events besides training
    private: bool  # False without noise, or with a seed
    noise: Noise = INDEPENDENT  # how the noise of steps is correlated, and the groups of users
    clipping: str = "normalize"  # or "clip"

    # The parts.

    def sampler(self, *, seed: int | None = None, key: bytes | None = None) -> PoissonBatches:
        """The sampler of the batches."""
        return PoissonBatches(self.users, self.sample_rate, self.steps, noise=self.noise, seed=seed, key=key)

    @property
    def clip(self) -> ClipFunction | None:
        """The clip function; None without privacy."""
        if not self.noise_multiplier:
            return None
        return (normalize if self.clipping == "normalize" else clip)(self.clip_norm)

    def optimizer(
        self, inner: torch.optim.Optimizer, *, context: str = "", seed: int | None = None, key: bytes | None = None
    ) -> PrivateOptimizer:
        """An optimizer with noisy steps; `context` identifies what a resumed run must agree on."""
        return PrivateOptimizer(
            inner,
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            expected_batch_size=self.expected_batch_size,
            noise=self.noise,
            context=context,
            seed=seed,
            key=key,
        )

    # Cost.

    @property
    def sample_rate(self) -> float:
        return self.expected_batch_size / self.users

    @property
    def training(self) -> Event:
        return self.noise.event(
            self.noise_multiplier, self.sample_rate, self.steps, label="training", private=self.private
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """Events of the releases and of training."""
        return (*self.releases, self.training) if self.steps else self.releases

    @cached_property
    def epsilon(self) -> float:
        """The certified ε of all events at δ; at most the target, inf without noise."""
        return epsilon_of(self.events, self.delta) if self.noise_multiplier else math.inf

    def noise_of(self, label: str) -> float | None:
        """The noise multiplier of a release besides training, None if there is none."""
        return next((event.noise_multiplier for event in self.releases if getattr(event, "label", "") == label), None)

    def spent(self, step: int) -> float:
        """An upper bound on ε after `step` steps, for progress bars: by RDP, which is fast, or the final ε."""
        if not self.noise_multiplier:
            return math.inf
        from dp_accounting.rdp import rdp_privacy_accountant

        orders, others, once = self._renyi
        times = self.training.repeated(step).compositions
        spent = others + times * once if step else others  # an order may be infinite, and 0·∞ is NaN
        left = self.delta - sum(event.repeats * event.failure for event in self.releases)
        with quiet():
            bound, _ = rdp_privacy_accountant.compute_epsilon(orders, spent, left)
        return min(self.epsilon, float(bound))

    @cached_property
    def _renyi(self) -> tuple[Any, Any, Any]:
        from dpformer.accounting.renyi import RenyiAccountant

        with quiet():
            others, once = RenyiAccountant(), RenyiAccountant()
            for event in self.releases:
                others.compose(event.once(), event.compositions)
            once.compose(self.training.once())
        return others.orders, others.rdp, once.rdp

    def to_dict(self) -> dict[str, Any]:
        """As JSON: an infinite ε becomes None."""
        facts = {name: getattr(self, name) for name in self._names()} | self.noise.settings()
        facts["epsilon_target"] = self.epsilon_target if self.noise_multiplier else None
        facts["releases"] = [event.to_dict() for event in self.releases]
        return facts

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "Plan":
        target = math.inf if facts["epsilon_target"] is None else facts["epsilon_target"]
        releases = tuple(Event.from_dict(event) for event in facts["releases"])
        values = {**facts, "epsilon_target": target, "releases": releases}
        return cls(**{name: values[name] for name in cls._names()}, noise=noise_of(facts))

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "noise"]
