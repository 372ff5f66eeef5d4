"""Rényi accounting for all events that the ledger knows: dp-accounting's, which lacks truncated Poisson sampling.

Whether `truncated_batch_size` or more of the other users are drawn does not depend on the data. Given that they are,
with probability τ, the release is at worst a Gaussian of sensitivity 1 without amplification, of Rényi divergence
α / 2σ²; else it is a Poisson-sampled Gaussian, of divergence D(α). Releasing which of both it was changes no
distribution of it, so a step's divergence is at most

    ln((1 − τ)·e^{(α−1)·D(α)} + τ·e^{(α−1)·α/2σ²}) / (α − 1).
"""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.rdp import RdpAccountant
from scipy.stats import binom


class RenyiAccountant(RdpAccountant):
    """dp-accounting's, and truncated Poisson sampling."""

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        if not isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if do_compose:
            self._rdp += count * truncated_divergences(event, self._orders)
        return None


def truncated_divergences(event: Any, orders: Any) -> np.ndarray:
    """(orders,) the bound above for one step."""
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    sampled = RdpAccountant(orders).compose(dp_accounting.PoissonSampledDpEvent(event.sampling_probability, gaussian))
    less = np.asarray(orders) - 1
    truncated = binom.logsf(event.truncated_batch_size - 1, event.dataset_size - 1, event.sampling_probability)
    whole = binom.logcdf(event.truncated_batch_size - 1, event.dataset_size - 1, event.sampling_probability)
    amplified = whole + less * sampled.rdp if math.isfinite(whole) else np.full(len(less), -math.inf)  # never −∞ + ∞
    unamplified = truncated + less * np.asarray(orders) / (2 * event.noise_multiplier**2)
    return np.asarray(np.logaddexp(amplified, unamplified) / less)
