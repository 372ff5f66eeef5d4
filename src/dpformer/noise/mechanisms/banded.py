"""Banded noise: each step's noise is partly cancelled in the following steps, so that sums of steps contain less of it.

Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (NeurIPS 2023). With z_t independent normal noise,
step t adds y_t, where C·y = z for a lower triangular Toeplitz matrix C of `bands` diagonals c_0 … c_{b−1}, ‖c‖ = 1:

    y_t = (z_t − Σ_{k=1}^{b−1} c_k·y_{t−k}) / c_0

The release, the sums g_t + σ·y_t, is equivalent to C·(g + σ·y) = C·g + σ·z. A user whose gradient enters step t changes
rows t … t+b−1 of C·g, by c, whose norm is 1: one Gaussian release of sensitivity 1. If a user takes part at most once
in any b consecutive steps, these rows never overlap, and each participation is a separate release. So users are dealt
at random into b groups, used in rotation, and each user of the current group is sampled independently with probability
b·q: batches are as large as without groups, and T steps cost ⌈T/b⌉ Poisson-sampled Gaussian releases at rate b·q.

Later gradients may depend on earlier releases: given a user's group and all other users' draws, rows t … t+b−1 are a
centre that is known by then, plus c times the user's contribution, if drawn, which is fixed at step t. Groups are
drawn independently, and a mixture over them is no easier to distinguish. Each step has more noise, and sums of
steps less: for small q and large ε, up to a third less.

Coefficients are those of the square root of the matrix of prefix sums, 1, 1/2, 3/8, 5/16 …, truncated to b and scaled
to norm 1 (Fichtenberger et al. 2023; nearly optimal for long sums).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpformer.accounting.arguments import number_text, whole
from dpformer.accounting.events import PoissonGaussian
from dpformer.accounting.units import UnitOfPrivacy
from dpformer.format_number import plain
from dpformer.noise.mechanisms.base import Noise, bound_in_words, deviation_in_words, register

MOST_BANDS = 2**20


def bands_of(value: object) -> int:
    """The number of steps over which noise is correlated: 1 (not at all) or more."""
    if (bands := whole("bands", value, 1)) > MOST_BANDS:
        raise ValueError(f"bands must be at most {MOST_BANDS:,}, not {number_text(value)}")
    return bands


@dataclass(frozen=True)
class BandedGaussian(PoissonGaussian):
    """Steps with noise correlated over `bands` of them, for as many groups of users in rotation.

    `sample_rate` is over all steps, expected batch size / users. A user takes part at most once in any `bands` steps,
    with probability bands·sample_rate; so ⌈steps / bands⌉ sampled Gaussians at that rate are all it costs.
    """

    kind = "banded_gaussian"
    adds_up = False  # two runs of one step are two compositions, one run of two steps with two bands is one
    bands: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("bands", bands_of(self.bands))
        _ = self.rate

    @property
    def compositions(self) -> int:
        return -(-self.steps // self.bands)

    @property
    def rate(self) -> float:
        return self.sample_rate if self.bands == 1 else Banded(self.bands).step_rate(self.sample_rate)


@register
@dataclass(frozen=True)
class Banded(Noise):
    """Noise correlated over `bands` steps, 2 or more, for as many groups of users in rotation."""

    event_type = BandedGaussian
    sampler = "Poisson, within groups used in rotation"
    bands: int

    def __post_init__(self) -> None:
        if bands_of(self.bands) < 2:
            raise ValueError(f"bands is {self.bands}, which is independent noise; correlated noise needs 2 or more")
        object.__setattr__(self, "bands", bands_of(self.bands))
        super().__post_init__()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Noise | None:
        return None if bands_of(settings.get("bands", 1)) == 1 else super().of(settings)

    @property
    def groups(self) -> int:
        return self.bands

    def coefficients(self) -> np.ndarray:
        ks = np.arange(1, self.bands)
        c = np.cumprod(np.concatenate([[1.0], (2 * ks - 1) / (2 * ks)]))
        return np.asarray(c / np.linalg.norm(c) * (1 - 1e-12))  # rounding must not lift the norm above 1

    @property
    def name(self) -> str:
        return f"noise correlated over {self.bands} steps"

    def sentence(self, facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        return (
            f"Training took {facts['steps']:,} steps. Every {unit.name} was dealt at random into one of {self.bands} "
            "groups, used in rotation, and took part in the steps of that group independently with probability "
            f"{plain(self.step_rate(facts['sample_rate']))}; {bound_in_words(facts, unit)}. The noise was correlated "
            f"over {self.bands} steps, so that each time it hid a {unit.name} as well as noise of standard deviation "
            f"{deviation_in_words(facts)} on a single sum."
        )

    def drawn(self, unit: UnitOfPrivacy) -> str:
        return (
            f"{unit.plural.capitalize()} are drawn independently in each round; noise is correlated over "
            f"{self.bands} steps."
        )

    def rows(self, sample_rate: float, unit: UnitOfPrivacy) -> list[tuple[str, str]]:
        return [
            ("noise correlated over steps, b", f"{self.bands}"),
            (f"probability of a {unit.name} in its group's step, b·q", plain(self.step_rate(sample_rate))),
        ]
