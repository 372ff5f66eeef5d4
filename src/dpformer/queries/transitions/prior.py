r"""Counts that an earlier run released, as a prior for those of this one: post-processing, which costs no budget.

A run of next week counts the same users again, with their new items. What last week's run released is public for it, so
both estimates of a pair {a, b} are combined, each weighted by the inverse of its variance, the earlier one scaled to
today's public number of users (S₀ and sd₀ by N₁/N₀):

    S = (S₁/sd₁² + S₀/sd₀²) / (1/sd₁² + 1/sd₀²),     sd = (1/sd₁² + 1/sd₀²)^(−1/2)

and the same for the difference of the two directions. A pair that only release r has found keeps its number of standard
deviations: S = S_r·sd/sd_r, between S_r and the mean of S_r with 0. (docs/guide/weekly.md has what this gains.)
The earlier release may itself be such a combination, so a chain of weekly runs keeps all of them. Popularity is this
run's own.

The guarantee of the run, ε, is *given* that earlier release; together they cost what a ledger over both composes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dpformer.queries.transitions.rounds import TransitionRelease

PREFIX = "prior "
KINDS: dict[str, tuple[type, int]] = {
    "items": (np.int64, 1),
    "pairs": (np.int64, 2),
    "total": (np.float64, 1),
    "difference": (np.float64, 1),
    "deviations": (np.float64, 1),
}


@dataclass(frozen=True)
class Prior:
    """Estimates of pairs of items of the present run, and the standard deviations of total and difference."""

    items: np.ndarray  # (m,) int64 ascending
    pairs: np.ndarray  # (K, 2) int64: indices in `items`, first < second
    total: np.ndarray  # (K,) float64
    difference: np.ndarray  # (K,) float64
    deviations: np.ndarray  # (2,) float64, both above 0

    @classmethod
    def of(cls, release: TransitionRelease, ids: Sequence[str], now: Sequence[str], scale: float) -> Prior:
        """From a release whose items are `ids`, for a run whose items are `now`; others are left out.

        Args:
            release: the earlier release, with its own prior, if any, already in it (`combined`).
            ids: the id of each item of the earlier run.
            now: the id of each item of this one.
            scale: users of this run over users of the earlier one.
        """
        number = {name: place for place, name in enumerate(now)}
        numbers = np.array([number.get(ids[item], -1) for item in release.items.tolist()], dtype=np.int64)
        ends = numbers[release.pairs].reshape(-1, 2)
        there = (ends >= 0).all(1)
        ends, turned = np.sort(ends[there], axis=1), ends[there, 0] > ends[there, 1]
        items = np.unique(numbers[numbers >= 0])
        order = np.lexsort((ends[:, 0], ends[:, 1]))
        return cls(
            items,
            np.searchsorted(items, ends[order]),
            scale * release.total[there][order],
            scale * np.where(turned, -1, 1)[order] * release.difference[there][order],
            scale * np.array([release.total_deviation, release.difference_deviation]),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """For releases.safetensors."""
        return {PREFIX + name: getattr(self, name) for name in KINDS}

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray], num_items: int) -> Prior | None:
        """The inverse of `arrays`; None if there is none. Invalid arrays raise ValueError."""
        found = {name: arrays[PREFIX + name] for name in KINDS if PREFIX + name in arrays}
        if not found:
            return None
        if found.keys() != KINDS.keys():
            raise ValueError("a part of the prior is missing")
        prior = cls(**found)
        m, count = len(prior.items), len(prior.pairs)
        inside = not m or (prior.items[0] >= 0 and prior.items[-1] < num_items and (np.diff(prior.items) > 0).all())
        paired = prior.pairs.shape == (count, 2) and (
            not count or bool((prior.pairs[:, 0] >= 0).all() and (prior.pairs[:, 0] < prior.pairs[:, 1]).all())
        )
        paired = paired and (not count or int(prior.pairs.max()) < m)
        fits = len(prior.total) == len(prior.difference) == count and prior.deviations.shape == (2,)
        if not (inside and paired and fits and (prior.deviations > 0).all()):
            raise ValueError("the prior contains pairs of items that it does not have")
        return prior


def combined(release: TransitionRelease) -> TransitionRelease:
    """The release with its prior, by the rule at the top of this file; unchanged if it has none."""
    prior = release.prior
    if prior is None:
        return release
    items = np.union1d(release.items, prior.items)
    size = max(len(items), 1)
    ends = [np.searchsorted(items, each.items)[each.pairs].reshape(-1, 2) for each in (release, prior)]
    keys = [each[:, 1] * size + each[:, 0] for each in ends]
    every = np.union1d(*keys)
    places = [np.searchsorted(every, each) for each in keys]
    total, total_deviation = _mean(
        len(every), places, (release.total, prior.total), (release.total_deviation, float(prior.deviations[0]))
    )
    difference, difference_deviation = _mean(
        len(every),
        places,
        (release.difference, prior.difference),
        (release.difference_deviation, float(prior.deviations[1])),
    )
    return replace(
        release,
        items=items,
        pairs=np.stack([every % size, every // size], axis=1),
        total=total,
        total_deviation=total_deviation,
        difference=difference,
        difference_deviation=difference_deviation,
        rounds=(),  # they are about the pairs of this run alone
        prior=None,
    )


def _mean(
    count: int, places: Sequence[np.ndarray], values: Sequence[np.ndarray], deviations: Sequence[float]
) -> tuple[np.ndarray, float]:
    """The mean of two estimates at `places` of `count`, by the rule at the top, and the standard deviation."""
    precision = [1 / deviation**2 for deviation in deviations]
    deviation = 1 / math.sqrt(sum(precision))
    found, known = np.zeros(count), np.zeros(count)
    for place, value, weight in zip(places, values, precision, strict=True):
        found[place] += value * weight
        known[place] += weight
    return found / np.sqrt(known) * deviation, deviation
