"""From shares of a budget to noise: what kinds of models and queries have in common when they are planned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dpformer.accounting.calibration import calibrate
from dpformer.accounting.events import Event
from dpformer.errors import DpformerError
from dpformer.queries.registry import asked_queries

if TYPE_CHECKING:
    from dpformer.runs.config import Config


def other_events(config: Config) -> tuple[Event, ...]:
    """The queries that the config asks besides what the model is made of, each with its share of the budget.

    A share s is counted in the square of the Gaussian parameter: all of (ε, δ) in one Gaussian release would be noise
    z₁, and μ = 1/z adds up in squares, so share s gets z = z₁/√s. One hundredth for the frequencies makes σ about 0.5%
    larger.
    """
    if not config.private or config.delta is None:
        return ()
    whole = _one_release(config.epsilon, config.delta)
    queries = [query for query in asked_queries(config) if query is not config.kind.release]
    return tuple(query.event(config, _noise(whole, query.share(config))) for query in queries)


def calibrated(
    config: Config, sample_rate: float, steps: int, others: tuple[Event, ...], set_aside: float = 0.0
) -> float:
    """σ of what the model is fitted by, with δ less what it fails with outright; 0 without privacy."""
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


def _one_release(epsilon: float, delta: float) -> float:
    """z₁: the noise of one Gaussian release that spends all of (ε, δ)."""
    import dp_accounting

    return float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def _noise(whole: float, share: float) -> float:
    return float(f"{whole / math.sqrt(share):.5g}")
