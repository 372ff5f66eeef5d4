"""Ratings predicted from item means, which are released with differential privacy, and from a user's own ratings.

    r̂_ui = μ + b_i + b_u

μ and b_i come from one Gaussian release: user u adds w·x_ui and w to item i, with w = 1/√n_u and the rating scaled to
x in [−1, 1], so that both vectors have an L2 norm of at most 1 and together of at most √2. b_u is made of the user's
own training ratings, and shown to nobody else: as in DPALS, everything a user is shown is a function of what was
released and of that user's own data (joint differential privacy). Means shrink towards the common one; by how much is
chosen on validation ratings, as there, and that choice is not covered by ε.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import dpformer as dp
from dpformer.noise.randomness import SecureRandom, public_grid

LOWEST, HIGHEST = 0.5, 5.0  # of MovieLens: public
SHRINK_ITEMS, SHRINK_USERS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0), (1.0, 3.0, 5.0, 10.0)
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # for training, validation and test


@dataclass(frozen=True)
class Sums:
    """Noisy sums over users, an item each; all that is learned from the data of others."""

    ratings: np.ndarray  # (M,) Σ w·x
    weights: np.ndarray  # (M,) Σ w

    @property
    def mean(self) -> float:
        return float(self.ratings.sum() / max(self.weights.sum(), 1.0))

    def effects(self, shrink: float) -> np.ndarray:
        """(M,) how far the mean of an item is from that of all, on the scale of ratings."""
        away = self.ratings - self.mean * self.weights
        return _HALF * away / np.maximum(np.maximum(self.weights, 0) + shrink, 1.0)


_HALF, _CENTRE = (HIGHEST - LOWEST) / 2, (HIGHEST + LOWEST) / 2


def exact_sums(users: np.ndarray, items: np.ndarray, ratings: np.ndarray, num_items: int) -> tuple[np.ndarray, ...]:
    """Σ w·x and Σ w, (M,) each, to which a user adds vectors of norm 1 at most. Not to be released."""
    weight = 1 / np.sqrt(np.bincount(users)[users])
    x = np.clip((ratings - _CENTRE) / _HALF, -1, 1)
    return tuple(np.bincount(items, weights=weight * value, minlength=num_items) for value in (x, np.ones_like(x)))


def release(
    users: np.ndarray, items: np.ndarray, ratings: np.ndarray, num_items: int, sigma: float, seed: int | None
) -> Sums:
    """One Gaussian release of noise multiplier σ: both sums together have sensitivity √2. Without noise not private."""
    exact = exact_sums(users, items, ratings, num_items)
    if not sigma:
        return Sums(*exact)
    random, deviation = SecureRandom("item means", seed=seed), sigma * 2**0.5
    step = public_grid(deviation)
    noise = (deviation * random.normal(num_items, step=place) for place in range(2))
    return Sums(*(np.round((a + b) / step) * step for a, b in zip(exact, noise, strict=True)))


def predicted(
    sums: Sums, known: Rows, wanted: tuple[np.ndarray, np.ndarray], shrink: tuple[float, float]
) -> np.ndarray:
    """Ratings of pairs (user, item), given the user's own ratings, `known` (users, items, ratings)."""
    level, effects = _CENTRE + _HALF * sums.mean, sums.effects(shrink[0])
    users, items, ratings = known
    size = int(max(users.max(), wanted[0].max())) + 1
    away = np.bincount(users, weights=ratings - level - effects[items], minlength=size)
    own = away / (np.bincount(users, minlength=size) + shrink[1])
    return np.clip(level + effects[wanted[1]] + own[wanted[0]], LOWEST, HIGHEST)


def rmse_of_means(
    user_ids: np.ndarray,
    item_ids: np.ndarray,
    ratings: np.ndarray,
    rows: Rows,
    epsilon: float,
    delta: float,
    seed: int | None = None,
) -> dict[str, Any]:
    """RMSE on test ratings with the shrinkage that is best on validation ratings."""
    (_, users), (names, items) = (np.unique(ids, return_inverse=True) for ids in (user_ids, item_ids))
    finite = math.isfinite(epsilon)
    sigma = dp.calibrate(epsilon=epsilon, delta=delta, sample_rate=1.0, steps=1) if finite else 0.0
    train, validation, test = ((users[part], items[part], ratings[part]) for part in rows)
    sums = release(*train, len(names), sigma, seed)
    tried = {shrink: _rmse(sums, train, validation, shrink) for shrink in _grid()}
    best = min(tried, key=lambda shrink: tried[shrink])
    known = tuple(np.concatenate(pair) for pair in zip(train, validation, strict=True))  # as theirs, for test
    return {
        "model": "item means",
        "epsilon": epsilon,
        "delta": delta,
        "noise_multiplier": sigma,
        "shrink": best,
        "validation rmse": tried[best],
        "rmse": _rmse(sums, known, test, best),  # type: ignore[arg-type]
        "rmse of one mean": float(np.sqrt(np.square(test[2] - _CENTRE - _HALF * sums.mean).mean())),
    }


def _rmse(sums: Sums, known: Rows, wanted: Rows, shrink: tuple[float, float]) -> float:
    return float(np.sqrt(np.square(predicted(sums, known, wanted[:2], shrink) - wanted[2]).mean()))


def _grid() -> Iterator[tuple[float, float]]:
    return ((of_items, of_users) for of_items in SHRINK_ITEMS for of_users in SHRINK_USERS)
