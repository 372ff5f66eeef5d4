"""The steps that an optimizer has taken, their batches, and their cost.

A step on a sampler's batch is a Poisson sample: the batch was drawn for this step and used for nothing else. All other
steps are accounted for without amplification, as if all users had been in them, and their events state the assumption.
No caller has to supply a rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from dpformer.accounting.arguments import sample_rate_of, whole
from dpformer.accounting.events import ASSUMED_EXACT, ASSUMED_ONCE, ASSUMED_RATE, Event, Gaussian
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
    sums: dict[int, str] = field(default_factory=dict)  # by step: identity of the noise, which names the noisy sum


USED: dict[str, Used] = {}  # by identity of the sampler


@contextmanager
def in_another_process() -> Iterator[None]:
    """What another process would do, which knows nothing of the draws used here: for audits."""
    here = dict(USED)
    USED.clear()
    try:
        yield
    finally:
        USED.clear()
        USED.update(here)


class StepsTaken:
    """The steps of one optimizer.

    Args:
        noise: the noise of the optimizer.
    """

    def __init__(self, noise: Noise) -> None:
        self.noise = noise
        self.unsampled = 0
        self.unchecked = 0  # steps on sums of an engine whose self-check was off
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
        """The first step on a sampler must not leave a gap: the steps before it are counted, by some optimizer."""
        used = USED.get(batch.origin.identity, Used())
        if batch.origin.private and batch.step > used.steps:
            raise ValueError(
                f"this optimizer begins at the batch of step {batch.step + 1}, and {used.steps} steps of this sampler "
                "were taken in this process, so steps in between are counted by nobody: restore the states of sampler "
                "and optimizer together"
            )

    def bind(self, batch: Batch | None, noisy: str) -> None:
        """Each draw is for one noisy sum; called before the noise is added.

        The same noise on the same sum may come again, because nothing new is released (a replay, a resumed run).

        Args:
            batch: the draw.
            noisy: identity of the noise, which is a function of key, settings and sum.
        """
        if batch is None or not batch.origin.private:
            return
        used = USED.setdefault(batch.origin.identity, Used())
        if used.sums.setdefault(batch.step, noisy) != noisy:
            raise ValueError(
                f"the draw of step {batch.step + 1} is in another noisy sum already, and {used.steps} steps of this "
                "sampler were taken in this process: two sums of one draw cost more than the events say; for another "
                "run create a sampler with a new key; to repeat steps whose results are discarded, resume in a new "
                "process"
            )

    def count(self, batch: Batch | None, self_checked: bool = True) -> None:
        """Record that a step was taken, and whether the engine checked itself."""
        self.unchecked += not self_checked
        if batch is None:
            self.unsampled += 1
            return
        batch.consume()
        used = USED.setdefault(batch.origin.identity, Used())
        used.steps = max(used.steps, batch.step + 1)
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
        assumed = "; ".join(filter(None, [assumed, ASSUMED_EXACT if self.unchecked else ""]))
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
        unchecked = {"unchecked": self.unchecked} if self.unchecked else {}
        sampled = [series.to_dict() for series in self._series.values()]
        return {"unsampled": self.unsampled, "sampled": sampled, **unchecked}

    @classmethod
    def load(cls, noise: Noise, state: Mapping[str, Any]) -> StepsTaken:
        """The inverse of `state`."""
        if not {"unsampled", "sampled"} <= set(state) <= {"unsampled", "sampled", "unchecked"}:
            raise ValueError(f"the steps of a state have the keys sampled and unsampled, not {sorted(state)}")
        found = cls(noise)
        found.unsampled = whole("unsampled", state["unsampled"], 0)
        found.unchecked = whole("unchecked", state.get("unchecked", 0), 0)
        every = [Series.from_dict(facts) for facts in state["sampled"]]
        found._series = {series.origin.identity: series for series in every}
        return found
