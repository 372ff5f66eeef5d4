"""The plan: one frozen object ties sampling, clipping, noise and accounting together, before any data is touched.

    q = B / N        the probability that a user is in a batch      (`sample_rate`)
    T = ⌈epochs / q⌉  the number of batches, fixed in advance         (`steps`)
    σ                the least noise with which everything that touches the data is (ε, δ)-DP (`noise_multiplier`)

Transition counts (`--model counts`) are no steps but one Gaussian release: T = 0, and σ is that release's.

A share s of the budget for a release besides training is counted in the square of the Gaussian parameter: all of
(ε, δ) in one Gaussian release would be noise z₁, and μ = 1/z adds up in squares, so share s gets z = z₁/√s. One
hundredth for the frequencies makes σ about 0.5% larger.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from dpformer.errors import DpformerError
from dpformer.privacy.accounting import epsilon_of, quiet
from dpformer.privacy.calibration import calibrate
from dpformer.privacy.events import METRICS, Event, Gaussian, training_event
from dpformer.runs.config import Config

COUNTS = "transition counts"
VOCABULARY_DELTA = 0.1  # of δ, for the threshold of a released vocabulary


@dataclass(frozen=True)
class Plan:
    """What a run will do to the data, and what that costs. Everything here is public."""

    users: int  # N
    expected_batch_size: int  # B
    steps: int  # T
    epsilon_target: float
    delta: float
    clip_norm: float
    noise_multiplier: float  # of training, on the sum, in units of clip_norm; 0 without privacy
    others: tuple[Event, ...]  # what touches the data besides training
    private: bool  # False without noise, and with a seed
    bands: int = 1  # steps over which noise is correlated, and groups of users that take turns

    @property
    def sample_rate(self) -> float:
        return self.expected_batch_size / self.users

    @property
    def training(self) -> Event:
        return training_event(
            self.noise_multiplier, self.sample_rate, self.steps, self.bands, label="training", private=self.private
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """Every touch of the data."""
        return (*self.others, self.training) if self.steps else self.others

    @cached_property
    def epsilon(self) -> float:
        """The certified ε of all events at δ; at most the target, inf without noise."""
        return epsilon_of(self.events, self.delta) if self.noise_multiplier else math.inf

    def noise_of(self, label: str) -> float | None:
        """The noise multiplier of a release besides training, None if there is none."""
        return next((event.noise_multiplier for event in self.others if getattr(event, "label", "") == label), None)

    def spent(self, step: int) -> float:
        """An upper bound on ε after `step` steps, for progress bars: Rényi, which takes no time, or the final ε."""
        if not self.noise_multiplier:
            return math.inf
        from dp_accounting.rdp import rdp_privacy_accountant

        orders, others, once = self._renyi
        times = self.training.repeated(step).compositions
        spent = others + times * once if step else others  # an order may be infinite, and 0·∞ is no number
        left = self.delta - sum(event.repeats * event.failure for event in self.others)
        with quiet():
            bound, _ = rdp_privacy_accountant.compute_epsilon(orders, spent, left)
        return min(self.epsilon, float(bound))

    @cached_property
    def _renyi(self) -> tuple[Any, Any, Any]:
        import dp_accounting

        with quiet():
            others, once = dp_accounting.rdp.RdpAccountant(), dp_accounting.rdp.RdpAccountant()
            for event in self.others:
                others.compose(event.once(), event.compositions)
            once.compose(self.training.once())
        return others.orders, others.rdp, once.rdp

    def to_dict(self) -> dict[str, Any]:
        """As JSON: an infinite ε is None."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        facts["epsilon_target"] = self.epsilon_target if self.noise_multiplier else None
        facts["others"] = [event.to_dict() for event in self.others]
        return facts

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "Plan":
        target = math.inf if facts["epsilon_target"] is None else facts["epsilon_target"]
        others = tuple(Event.from_dict(event) for event in facts["others"])
        return cls(**{**facts, "epsilon_target": target, "others": others})


def make_plan(config: Config, users: int) -> Plan:
    """Calibrates a resolved config for a public number of users."""
    assert config.batch_size and config.delta and config.epochs, "resolve the config first"
    # Whole numbers throughout: epochs / q in floating point can be a step off.
    steps = -(-config.epochs * users // config.batch_size)
    others = other_events(config)
    if config.model == "counts":
        steps, noise_multiplier = 0, _calibrate(config, 1.0, 1, others)
        private = config.seed is None
        others = (*others, Gaussian(noise_multiplier=noise_multiplier, label=COUNTS, private=private))
    else:
        noise_multiplier = _calibrate(config, config.batch_size / users, steps, others)
    return Plan(
        users=users,
        expected_batch_size=config.batch_size,
        steps=steps,
        epsilon_target=config.epsilon,
        delta=config.delta,
        clip_norm=config.clip_norm,
        noise_multiplier=noise_multiplier,
        others=others,
        private=config.private and config.seed is None,
        bands=config.bands,
    )


def _calibrate(config: Config, sample_rate: float, steps: int, others: tuple[Event, ...]) -> float:
    if not config.private:
        return 0.0
    assert config.delta is not None
    try:
        return calibrate(
            epsilon=config.epsilon,
            delta=config.delta,
            sample_rate=sample_rate,
            steps=steps,
            others=others,
            bands=config.bands,
        )
    except ValueError as error:
        raise DpformerError(str(error)) from None


def other_events(config: Config) -> tuple[Event, ...]:
    """The releases besides training that the config asks for, each with its share of the budget."""
    if not config.private or config.delta is None:
        return ()
    sure = config.seed is None
    whole = _one_release(config.epsilon, config.delta)
    events: list[Event] = []
    if config.private_vocabulary:
        noise = _noise(whole, config.vocabulary_share)
        spare = VOCABULARY_DELTA * config.delta
        events.append(Gaussian(noise_multiplier=noise, label="vocabulary", delta=spare, private=sure))
    if config.warm_start:
        events.append(Gaussian(noise_multiplier=_noise(whole, config.warm_start), label=COUNTS, private=sure))
    if config.needs_frequencies:
        noise = _noise(whole, config.frequency_share)
        events.append(Gaussian(noise_multiplier=noise, label="frequencies", private=sure))
    if config.private_metrics:
        noise = _noise(whole, config.metrics_share)
        events.append(Gaussian(noise_multiplier=noise, label=METRICS, private=sure))
    return tuple(events)


def _one_release(epsilon: float, delta: float) -> float:
    """z₁: the noise of one Gaussian release that spends all of (ε, δ)."""
    import dp_accounting

    return float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def _noise(whole: float, share: float) -> float:
    return float(f"{whole / math.sqrt(share):.5g}")
