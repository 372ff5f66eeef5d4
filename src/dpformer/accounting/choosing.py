"""Choosing ε: what each value means for one person, for a count, and for accuracy as measured on public data.

One vector released with Gaussian noise stands for all mechanisms here: among those with the same (ε, δ) in this
library, it allows the strongest attacks (training on sampled batches allows slightly weaker ones).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from dpformer.accounting.arguments import whole
from dpformer.accounting.attack_rates import attack_rates
from dpformer.accounting.calibration import calibrate
from dpformer.accounting.events import Gaussian

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
ALARMS = (0.01, 0.001)
ITEMS_PER_USER = 20
ADVICE = (
    "Start from 5, the default, for ordinary data such as films and games. Go down to 1 or 2 if being in the data at "
    "all is sensitive, or if you have a hundred thousand users. Keep 8 and more for experiments: the bound on attacks "
    "is weak there."
)


@dataclass(frozen=True)
class Choice:
    """One value of ε and what it means."""

    epsilon: float
    delta: float
    found: Mapping[float, float]  # false positive rate → bound on the true positive rate of any attack
    noise_multiplier: float  # of one query with this budget
    items_per_user: int

    @property
    def count_noise(self) -> float:
        """The standard deviation of each count, in users, if the whole budget is spent on counting who has each item.

        A user adds 1 to each of at most K items, an L2 norm of √K.
        """
        return self.noise_multiplier * math.sqrt(self.items_per_user)

    def kept(self) -> dict[str, float]:
        """Data set → accuracy of counts at this ε relative to training without noise, where it was measured."""
        found = {}
        for name, facts in measured()["data"].items():
            here = facts["by_epsilon"].get(f"{self.epsilon:g}")
            if here is not None:
                found[name] = here["mean"] / facts["without_noise"]
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "factor": math.exp(min(self.epsilon, 700.0)),
            "members_found": {f"{alarms:g}": share for alarms, share in self.found.items()},
            "count_noise": self.count_noise,
            "accuracy_kept": self.kept(),
        }


def choice(epsilon: float, delta: float, items_per_user: int = ITEMS_PER_USER) -> Choice:
    """What one value of ε means.

    >>> one = choice(1.0, 1e-6)
    >>> round(one.found[0.01], 3), round(one.count_noise, 1)
    (0.02, 18.9)
    """
    items_per_user = whole("items_per_user", items_per_user, 1)
    sigma = calibrate(epsilon=epsilon, delta=delta, sample_rate=1.0, steps=1)
    found = {alarms: attack_rates([Gaussian(sigma)], delta, alarms).true_positive_rate for alarms in ALARMS}
    return Choice(epsilon, delta, found, sigma, items_per_user)


def measured() -> dict[str, Any]:
    """Accuracy of counts by ε on public data sets; `python -m experiments.choosing` makes the table."""
    text = files("dpformer.accounting").joinpath("measured.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
