"""Which steps an optimizer has taken, on whose batches, and what they cost.

A step on a batch of a sampler is a Poisson sample: it was drawn for this step and nothing else was done with it. All
other steps are accounted for without amplification, as if everybody had been in them, and their events say what is
assumed. Nobody is asked for a rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


class StepsTaken:
    """The steps of one optimizer.

    Args:
        noise: of the optimizer.
    """

    def __init__(self, noise: Noise) -> None:
        self.noise = noise
        self.unsampled = 0
        self._series: dict[str, Series] = {}

    @property
    def total(self) -> int:
        return self.unsampled + sum(series.count for series in self._series.values())

    def check(self, batch: Batch | None) -> None:
        """Raises unless a step on this batch can be the next one; None: a step that claims no sampling."""
        if batch is None:
            return
        if batch.origin.noise != self.noise:
            raise ValueError(
                f"the steps have {self.noise.name}, and users were drawn for {batch.origin.noise.name}: give "
                "PoissonBatches and PrivateOptimizer the same noise"
            )
        series = self._series.get(batch.origin.identity)
        if series is not None and batch.step != series.first + series.count:
            raise ValueError(
                f"the batch of step {batch.step + 1} came where that of step {series.first + series.count + 1} was "
                "due: each batch is one step, in order; restore the states of sampler and optimizer together"
            )
        if self.noise.groups > 1 and self.total and (series is None or series.count < self.total):
            raise ValueError(
                f"with {self.noise.name} users take turns, so one PoissonBatches lasts for all of training, and each "
                "of its batches, an empty one too, is one step; the steps so far were not all of this sampler"
            )

    def count(self, batch: Batch | None) -> None:
        """A step was taken."""
        if batch is None:
            self.unsampled += 1
            return
        batch.consume()
        self._series.setdefault(batch.origin.identity, Series(batch.origin, batch.step)).count += 1

    def events(
        self, noise_multiplier: float, sample_rate: float | None, *, label: str, assumed: str, private: bool
    ) -> tuple[Event, ...]:
        """What the steps cost, in the order of the samplers.

        Args:
            noise_multiplier: σ.
            sample_rate: of steps without a batch, on the caller's word; None: no claim.
            label: of all events.
            assumed: what is assumed of all of them; "" for nothing.
            private: False if the noise came from a seed.
        """
        marked = f"{label} ({assumed})" if assumed else label
        found: list[Event] = []
        for series in self._series.values():
            rate, secret = series.origin.sample_rate, private and series.origin.private
            found.append(self.noise.event(noise_multiplier, rate, series.count, label=marked, private=secret))
        if not self.unsampled:
            if sample_rate is not None and found:
                raise ValueError("every step was taken on a batch, which knows its sample rate: give none")
            return tuple(found)
        if self.noise.groups > 1:
            raise ValueError(
                f"{self.unsampled} steps were taken without a batch, and {self.noise.name} protects only users who "
                "take turns: step on the batches of one PoissonBatches, `optimizer.step(batch)`"
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
    def load(cls, noise: Noise, state: Mapping[str, Any]) -> StepsTaken:
        """The inverse of `state`."""
        if set(state) != {"unsampled", "sampled"}:
            raise ValueError(f"the steps of a state have the keys sampled and unsampled, not {sorted(state)}")
        found = cls(noise)
        found.unsampled = whole("unsampled", state["unsampled"], 0)
        every = [Series.from_dict(facts) for facts in state["sampled"]]
        found._series = {series.origin.identity: series for series in every}
        return found
