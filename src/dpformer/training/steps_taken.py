"""The steps that an optimizer has taken, their batches, and their cost.

A step on a sampler's batch is a Poisson sample: the batch was drawn for this step and used for nothing else. All other
steps are accounted for without amplification, as if all users had been in them, and their events state the assumption.
No caller has to supply a rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dpformer.accounting.arguments import sample_rate_of, whole
from dpformer.accounting.events import ASSUMED_ONCE, ASSUMED_RATE, Event, Gaussian
from dpformer.noise.mechanisms import Noise, noise_of
from dpformer.sampling.batch import Batch, Origin


@dataclass
class Series:
    """Consecutive steps on the batches of one sampler."""

    origin: Origin
    first: int
    count: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for `torch.load(weights_only=True)`."""
        facts = {name: value for name, value in asdict(self.origin).items() if name != "noise"}
        return {**facts, **self.origin.noise.settings(), "first": self.first, "count": self.count}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Series:
        names = ("identity", "n", "sample_rate", "steps", "private")
        origin = Origin(**{name: facts[name] for name in names}, noise=noise_of(facts))
        return cls(origin, whole("first", facts["first"], 0), whole("count", facts["count"], 1))


@dataclass
class Used:
    """What became of the draws of one sampler in this process."""

    steps: int = 0  # batches that were stepped on
    noises: set[str] = field(default_factory=set)  # of the optimizers that did


USED: dict[str, Used] = {}  # by identity of the sampler


class StepsTaken:
    """The steps of one optimizer.

    Args:
        noise: the noise of the optimizer.
        random: names the key and the settings of that noise, and does not reveal the key.
    """

    def __init__(self, noise: Noise, random: str) -> None:
        self.noise, self.random = noise, random
        self.unsampled = 0
        self._series: dict[str, Series] = {}

    @property
    def total(self) -> int:
        return self.unsampled + sum(series.count for series in self._series.values())

    def check(self, batch: Batch | None) -> None:
        """Raise unless a step on this batch can be the next one; None: a step that claims no sampling."""
        if batch is None:
            return
        if batch.origin.noise != self.noise:
            raise ValueError(
                f"the steps have {self.noise.name}, but users were drawn for {batch.origin.noise.name}: give "
                "PoissonBatches and PrivateOptimizer the same noise"
            )
        series = self._series.get(batch.origin.identity)
        if series is None:
            self._check_first(batch)
        elif batch.step != series.first + series.count:
            raise ValueError(
                f"got the batch of step {batch.step + 1} instead of that of step {series.first + series.count + 1}: "
                "each batch is one step, in order; restore the states of sampler and optimizer together"
            )
        if self.noise.groups > 1 and self.total and (series is None or series.count < self.total):
            raise ValueError(
                f"with {self.noise.name} users are dealt into groups, so one PoissonBatches must be used for all of "
                "training, and each of its batches, including empty ones, is one step; the steps so far were not all "
                "on this sampler"
            )

    def _check_first(self, batch: Batch) -> None:
        """Each draw is for one noisy sum: steps on a sampler begin where the steps of others on it ended.

        An optimizer with the same key and settings may repeat them, because it repeats the same releases (a replay).
        """
        used = USED.get(batch.origin.identity, Used())
        if batch.origin.private and batch.step != used.steps and self.random not in used.noises:
            raise ValueError(
                f"this optimizer begins at the batch of step {batch.step + 1}, and {used.steps} steps of this sampler "
                "were taken in this process: a draw that is used again, or steps that nobody counts, cost more than "
                "the events say; to resume, restore the states of sampler and optimizer together, and for another run "
                "create a sampler with a new key"
            )

    def count(self, batch: Batch | None) -> None:
        """Record that a step was taken."""
        if batch is None:
            self.unsampled += 1
            return
        batch.consume()
        used = USED.setdefault(batch.origin.identity, Used())
        used.steps = batch.step + 1
        used.noises.add(self.random)
        self._series.setdefault(batch.origin.identity, Series(batch.origin, batch.step)).count += 1

    def events(
        self, noise_multiplier: float, sample_rate: float | None, *, label: str, assumed: str, private: bool
    ) -> tuple[Event, ...]:
        """The cost of the steps, in the order of the samplers.

        Args:
            noise_multiplier: σ.
            sample_rate: rate of steps without a batch, vouched for by the caller; None: no claim.
            label: label of all events.
            assumed: assumption about all of them; "" for none.
            private: False if the noise was seeded.
        """
        marked = f"{label} ({assumed})" if assumed else label
        found: list[Event] = []
        for series in self._series.values():
            rate, secret = series.origin.sample_rate, private and series.origin.private
            found.append(self.noise.event(noise_multiplier, rate, series.count, label=marked, private=secret))
        if not self.unsampled:
            if sample_rate is not None and found:
                raise ValueError("every step was taken on a batch, which knows its sample rate: omit sample_rate")
            return tuple(found)
        if self.noise.groups > 1:
            raise ValueError(
                f"{self.unsampled} steps were taken without a batch, but {self.noise.name} protects only users dealt "
                "into groups: step on the batches of one PoissonBatches, `optimizer.step(batch)`"
            )
        if sample_rate is None:
            label = f"{label} ({'; '.join(filter(None, [assumed, ASSUMED_ONCE]))})"
            return (*found, Gaussian(noise_multiplier, self.unsampled, label=label, private=private))
        label = f"{label} ({'; '.join(filter(None, [assumed, ASSUMED_RATE]))})"
        rate = sample_rate_of(sample_rate)
        return (*found, self.noise.event(noise_multiplier, rate, self.unsampled, label=label, private=private))

    # State.

    def state(self) -> dict[str, Any]:
        return {"unsampled": self.unsampled, "sampled": [series.to_dict() for series in self._series.values()]}

    @classmethod
    def load(cls, noise: Noise, random: str, state: Mapping[str, Any]) -> StepsTaken:
        """The inverse of `state`."""
        if set(state) != {"unsampled", "sampled"}:
            raise ValueError(f"the steps of a state have the keys sampled and unsampled, not {sorted(state)}")
        found = cls(noise, random)
        found.unsampled = whole("unsampled", state["unsampled"], 0)
        every = [Series.from_dict(facts) for facts in state["sampled"]]
        found._series = {series.origin.identity: series for series in every}
        return found
