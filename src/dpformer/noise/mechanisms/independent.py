"""Independent noise: every step draws its own, and every user may be in every step (DP-SGD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpformer.accounting.events import PoissonGaussian
from dpformer.accounting.units import UnitOfPrivacy
from dpformer.format_number import plain
from dpformer.noise.mechanisms.base import Noise, bound_in_words, deviation_in_words, register


@register
@dataclass(frozen=True)
class Independent(Noise):
    """Each step's noise is N(0, σ²C²·I), independent of all others."""

    event_type = PoissonGaussian
    groups = 1
    name = "independent noise"
    sampler = "Poisson"

    def coefficients(self) -> np.ndarray:
        return np.ones(1)

    def sentence(self, facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        return (
            f"Training took {facts['steps']:,} steps. In each, every {unit.name} took part independently with "
            f"probability {plain(facts['sample_rate'])}; {bound_in_words(facts, unit)}, and noise of standard "
            f"deviation {deviation_in_words(facts)} was added to the sum."
        )

    def drawn(self, unit: UnitOfPrivacy) -> str:
        return f"Noise and {unit.plural} are drawn independently in each step."


INDEPENDENT = Independent()
