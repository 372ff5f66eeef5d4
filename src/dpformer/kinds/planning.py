"""From shares of a budget to noise: what kinds of models and queries have in common in planning."""

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
    """The events of the config's queries besides the release of the model, each with its share of the budget.

    Shares refer to the square of the Gaussian parameter: spending all of (ε, δ) on one Gaussian release needs noise z₁,
    and μ = 1/z adds up in squares, so share s gets z = z₁/√s. One hundredth for the frequencies makes σ about 0.5%
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
    """σ for fitting the model, at δ minus the outright failure probability; 0 without privacy."""
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
