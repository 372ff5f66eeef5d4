"""The plan of a config: steps, noise, and the share of the budget that each release gets."""

import math

from dpformer.accounting.arguments import epsilon_budget
from dpformer.accounting.calibration import calibrate
from dpformer.accounting.events import METRICS, Event, Gaussian
from dpformer.errors import DpformerError
from dpformer.queries.counts import LABEL as COUNTS
from dpformer.queries.items import LABEL as ITEMS
from dpformer.runs.config import Config
from dpformer.training.plan import Plan

LIST_DELTA = 0.1  # of δ, for the threshold of a released list of items


def make_plan(config: Config, users: int) -> Plan:
    """Calibrates a resolved config for a public number of users."""
    check_budget(config)
    others = other_events(config)
    if config.model == "counts" and not config.private:
        batch_size, steps, noise_multiplier = users, 0, 0.0
    elif config.model == "counts":
        batch_size, steps, noise_multiplier = users, 0, _calibrate(config, 1.0, 1, others, list_delta(config))
        others = (*others, _counts(config, noise_multiplier))
    else:
        assert config.batch_size and config.epochs, "resolve the config first"
        batch_size = config.batch_size
        # Whole numbers throughout: epochs / q in floating point can be a step off.
        steps = -(-config.epochs * users // batch_size)
        noise_multiplier = _calibrate(config, batch_size / users, steps, others)
    assert config.delta, "resolve the config first"
    return Plan(
        users=users,
        expected_batch_size=batch_size,
        steps=steps,
        epsilon_target=config.epsilon,
        delta=config.delta,
        clip_norm=config.clip_norm,
        noise_multiplier=noise_multiplier,
        releases=others,
        clipping=config.clipping,
        private=config.private and config.seed is None,
        noise=config.noise,
    )


def check_budget(config: Config) -> None:
    """Refuses an ε for which nothing is worked out, before any data is read."""
    try:
        if config.private:
            epsilon_budget(config.epsilon)
    except ValueError as error:
        raise DpformerError(str(error)) from None


def list_delta(config: Config) -> float:
    """What the threshold of a released list of items may fail with; 0 if the list is not released."""
    assert config.delta is not None
    return LIST_DELTA * config.delta if config.items_policy == "dp" else 0.0


def _counts(config: Config, noise: float) -> Event:
    """Transition counts: their round of items releases the list too, where there is no public one."""
    return Gaussian(noise, label=COUNTS, delta=list_delta(config), private=config.seed is None)


def _calibrate(
    config: Config, sample_rate: float, steps: int, others: tuple[Event, ...], set_aside: float = 0.0
) -> float:
    """σ of training, with δ less what it fails with outright."""
    if not config.private:
        return 0.0
    assert config.delta is not None
    try:
        return calibrate(
            epsilon=config.epsilon,
            delta=config.delta - set_aside,
            sample_rate=sample_rate,
            steps=steps,
            others=others,
            noise=config.noise,
        )
    except ValueError as error:
        raise DpformerError(str(error)) from None


def other_events(config: Config) -> tuple[Event, ...]:
    """The releases besides training that the config asks for, each with its share of the budget.

    A share s is counted in the square of the Gaussian parameter: all of (ε, δ) in one Gaussian release would be noise
    z₁, and μ = 1/z adds up in squares, so share s gets z = z₁/√s. One hundredth for the frequencies makes σ about 0.5%
    larger.
    """
    if not config.private or config.delta is None:
        return ()
    sure = config.seed is None
    whole = _one_release(config.epsilon, config.delta)
    events: list[Event] = []
    if config.releases_items:
        noise = _noise(whole, config.items_share)
        events.append(Gaussian(noise, label=ITEMS, delta=list_delta(config), private=sure))
    if config.warm_start:
        events.append(_counts(config, _noise(whole, config.warm_start)))
    if config.needs_frequencies and not config.releases_items:
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
