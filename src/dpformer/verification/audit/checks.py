"""Checks of the randomness that the guarantee rests on (noise and sampling), and of one user's contribution.

A score averages over all steps and coordinates, which hides some faults. Noise that is used twice passes every test of
one release and cancels in the difference of two. Batches of fixed size have the right rate. Each check has an exact or
nearly exact distribution if all is well, and fails below a p-value of `ALARM`, so that a correct build fails any of
them about once in 50,000 audits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dpformer.accounting.events import Event, PoissonGaussian
from dpformer.verification.audit.bound import Guesses, total_variation
from dpformer.verification.audit.observation import Contribution, Observation

ALARM = 1e-6
MOST = 2048  # maximum number of steps, coordinates or users for which all pairs are tested
SAMPLES = 100_000  # for the shape of the distribution: more would reveal the public grid of the noise


@dataclass(frozen=True)
class Check:
    """One comparison of a measurement with the claim."""

    name: str
    measured: str
    expected: str
    p_value: float
    of: str = ""  # the mechanism, if there are several

    @property
    def passed(self) -> bool:
        return self.p_value >= ALARM

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def checks(seen: Observation) -> list[Check]:
    """All checks of one observation."""
    return [
        *noise_checks(seen),
        *inclusion_checks(seen),
        *contribution_checks(sum(seen.contributions.values(), Contribution()), seen.mechanism.noise_multiplier),
        in_each_parameter(seen.contributions, seen.mechanism.noise_multiplier),
        counted(seen),
    ]


def noise_checks(seen: Observation) -> Iterator[Check]:
    """The noise x, (T, K): standard normal, independent, and never reused."""
    x = seen.noise
    yield from distribution_checks(x, seen.mechanism.noise_multiplier)
    parts = {name: x[:, columns] for name, columns in seen.columns.items()}
    found = [
        (name, math.sqrt(_squares(part) / part.size), _chi2(_squares(part), part.size)) for name, part in parts.items()
    ]
    yield _worst("noise: standard deviation in each parameter", found)
    yield _largest("noise: any two steps, before and after a restart", _some_steps(x, seen.restart))
    yield _largest("noise: any two coordinates", x[:, :MOST].T)
    # Training was resumed from one checkpoint twice, once with other data: reused noise would cancel.
    yield _largest("noise: resumed with other data", np.stack([x[seen.restart], seen.other_data]))
    if seen.runs is not None:
        yield another_run(*seen.runs)


def another_run(noise: np.ndarray, other: np.ndarray) -> Check:
    """(K,) noise of two runs: reused noise would cancel."""
    return _largest("noise: of another run", np.stack([noise, other]))


def distribution_checks(x: np.ndarray, sigma: float) -> Iterator[Check]:
    """Noise (T, K) over its claimed standard deviation: standard normal, and neighbours independent."""
    n, steps, width = x.size, *x.shape
    squares = _squares(x)
    deviation = sigma * math.sqrt(squares / n)
    yield Check("noise: standard deviation", f"{deviation:.5g}", f"{sigma:.5g}", _chi2(squares, n))
    mean = float(x.mean(dtype=np.float64))
    yield Check("noise: mean", f"{sigma * mean:.2g}", "0", _normal(mean * math.sqrt(n)))
    yield _normality(x.ravel()[:: max(1, n // SAMPLES)], deviation / sigma)
    after = float((x[1:] * x[:-1]).sum(dtype=np.float64)) / math.sqrt(max(1, (steps - 1) * width))
    yield _correlation("noise: from step to step", after, (steps - 1) * width)
    beside = float((x[:, 1:] * x[:, :-1]).sum(dtype=np.float64)) / math.sqrt(steps * (width - 1))
    yield _correlation("noise: from coordinate to coordinate", beside, steps * (width - 1))
    sums = float(np.square(x.sum(1, dtype=np.float64)).sum()) / width
    yield Check("noise: all coordinates of a step", f"{sums / steps:.4g}", "1", _chi2(sums, steps))


def spread_check(name: str, x: np.ndarray) -> Check:
    """Whether numbers have the spread of standard normal ones (χ²): the noise of a release over the claim."""
    squares, n = _squares(x), len(x)
    return Check(name, f"{math.sqrt(squares / n):.4g}", "1", _chi2(squares, n))


def inclusion_checks(seen: Observation) -> Iterator[Check]:
    """Inclusion a, (T, n): true with probability q, independently."""
    from scipy import stats

    a, q = seen.inclusion, seen.mechanism.event.sample_rate
    steps, users = a.shape
    total, n = int(a.sum()), a.size
    below, above = float(stats.binom.cdf(total, n, q)), float(stats.binom.sf(total - 1, n, q))
    yield Check("inclusion: rate", f"{total / n:.5g}", f"{q:.5g}", min(1.0, 2 * min(below, above)))
    yield Check(
        "inclusion: two processes with one key agree", "yes" if seen.same_batches else "no", "yes",
        float(seen.same_batches),
    )  # fmt: skip
    yield Check("inclusion: no user twice in a step", "yes" if seen.once else "no", "yes", float(seen.once))
    if (groups := seen.mechanism.noise.groups) > 1:
        name = f"inclusion: at most once in {groups} steps"
        yield Check(name, "yes" if seen.in_turn else "no", "yes", float(seen.in_turn))
    if q == 1:
        return
    yield _dispersion("inclusion: size of batches (independent users)", a.sum(1), users, q)
    yield _dispersion("inclusion: batches of a user (independent steps)", a.sum(0), steps, q)
    centred = (a - q) / math.sqrt(q * (1 - q))
    after = float((centred[1:] * centred[:-1]).sum()) / math.sqrt(max(1, (steps - 1) * users))
    yield _correlation("inclusion: from step to step", after, (steps - 1) * users)
    yield _overlap("inclusion: any two users", a[:, :MOST].T, q)
    yield _overlap("inclusion: any two steps, before and after a restart", _some_steps(a, seen.restart), q)


def contribution_checks(seen: Contribution, deviation: float, of: str = "one user") -> Iterator[Check]:
    """The contributions of users at their coordinates: the clip norm for each, since all canaries exceed it.

    Args:
        seen: values at their own coordinates, in clip norms.
        deviation: standard deviation of the noise there.
        of: name of the users.
    """
    mean, error = seen.total / max(seen.count, 1), deviation / math.sqrt(max(seen.count, 1))
    p = _normal((mean - 1) / error) if seen.count else 1.0
    yield Check(f"contribution of {of}, in clip norms", f"{mean:.4f} ± {error:.4f}", "1", p)
    squares, count = seen.squares / deviation**2, max(seen.count, 1)  # users who contribute 2 and 0 have the right mean
    p = _chi2(squares, count) if seen.count else 1.0
    yield Check(f"contribution: spread for {of}", f"{squares / count:.4g}", "1", p)


def in_each_parameter(seen: dict[str, Contribution], deviation: float) -> Check:
    """A user contributes as much to a bias or a kernel as to a table."""
    found = [
        (name, one.total / one.count, _normal((one.total / one.count - 1) * math.sqrt(one.count) / deviation))
        for name, one in seen.items()
        if one.count
    ]
    return _worst("contribution in each parameter", found)


def counted(seen: Observation) -> Check:
    """The event that training reports for the ledger must match the claim and what was done."""
    claimed = seen.mechanism.claimed
    # The rate is that of whole numbers of users, hence rounded.
    same = len(seen.ledger) == 1 and _nearly(seen.ledger[0], claimed)
    measured = "; ".join(f"{event.repeats} steps, noise {event.noise_multiplier:.5g}" for event in seen.ledger)
    return Check("ledger: the event of these steps", measured, "as claimed" if same else repr(claimed), float(same))


def _nearly(event: Event, claimed: PoissonGaussian) -> bool:
    """Equal up to the last digit of the rate."""
    if not isinstance(event, PoissonGaussian):
        return False
    rates = math.isclose(event.sample_rate, claimed.sample_rate, rel_tol=1e-12)
    return rates and replace(event, label="", private=True, sample_rate=claimed.sample_rate) == claimed


def alone_check(released: int, users: int, chance: float) -> Check:
    """Users with unique items: each of their items is released with at most this probability."""
    from scipy import stats

    p = float(stats.binom.sf(released - 1, users, chance)) if released else 1.0
    return Check("list: items of a single user", f"{released} of {users}", f"at most {users * chance:.2g}", p)


def told_apart(guesses: Guesses, claimed: Sequence[PoissonGaussian]) -> Check:
    """The number of canaries guessed wrong, and the probability of so few if the claim is true."""
    from scipy import stats

    canaries = guesses.members + guesses.non_members
    least = (1 - total_variation(claimed)) / 2
    p = float(stats.binom.cdf(guesses.errors, canaries, least))
    return Check("canaries guessed wrong", f"{guesses.errors / canaries:.4f}", f"at least {least:.4f}", p)


# Statistics.


def _normality(x: np.ndarray, deviation: float) -> Check:
    """Kolmogorov–Smirnov, and the fourth moment for the tails; independent of the standard deviation."""
    from scipy import stats

    if not deviation:
        return Check("noise: normal distribution", "none", "0", 0.0)
    x = x / deviation
    distance, p = stats.kstest(x, "norm")
    fourth = (float(np.mean(x.astype(np.float64) ** 4)) - 3) / math.sqrt(24 / len(x))  # standardised
    return Check(
        "noise: normal distribution", f"distance {distance:.2g}", "0", min(1.0, 2 * min(float(p), _normal(fourth)))
    )


def _correlation(name: str, z: float, terms: int) -> Check:
    return Check(name, f"{z / math.sqrt(max(1, terms)):.2g}", "0", _normal(z))


def _dispersion(name: str, counts: np.ndarray, trials: int, q: float) -> Check:
    """Whether counts vary like independent trials: less means fixed-size batches, more means dependent users."""
    from scipy import stats

    variance = trials * q * (1 - q)
    seen = float(np.square(counts - trials * q).sum() / variance)
    # Mean and variance of this sum of squares are known exactly; it is compared with a gamma distribution.
    spread = len(counts) * (2 + (1 - 6 * q * (1 - q)) / variance)
    shape, scale = len(counts) ** 2 / spread, spread / len(counts)
    p = 2 * min(stats.gamma.cdf(seen, shape, scale=scale), stats.gamma.sf(seen, shape, scale=scale))
    return Check(name, f"{seen / len(counts):.4g}", "1", min(1.0, float(p)))


def _largest(name: str, rows: np.ndarray) -> Check:
    """The largest correlation between two of the rows: for independent normal rows r√(n−1)/√(1−r²) is Student's t."""
    from scipy import stats

    count, n = rows.shape
    unit = rows / np.maximum(
        np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(rows.dtype).tiny
    )  # without noise there is none
    r = np.abs(unit @ unit.T)
    np.fill_diagonal(r, 0)
    largest = min(float(r.max()), 1 - 1e-12)
    t = largest * math.sqrt((n - 1) / (1 - largest**2))
    p = count * (count - 1) / 2 * 2 * float(stats.t.sf(t, n - 1))
    return Check(name, f"{largest:.3g}", "0", min(1.0, p))


def _overlap(name: str, rows: np.ndarray, q: float) -> Check:
    """For any two rows, how often both are true: binomial at q²."""
    from scipy import stats

    count, n = rows.shape
    both = rows.astype(np.float32) @ rows.T.astype(np.float32)
    pairs = both[np.triu_indices(count, 1)]
    if not len(pairs):
        return Check(name, "none", "any", 1.0)
    least, most = float(pairs.min()), float(pairs.max())
    tail = min(float(stats.binom.cdf(least, n, q * q)), float(stats.binom.sf(most - 1, n, q * q)))
    return Check(name, f"{least:.0f} … {most:.0f}", f"about {n * q * q:.1f}", min(1.0, 2 * len(pairs) * tail))


def _worst(name: str, found: list[tuple[str, float, float]]) -> Check:
    """The worst of several comparisons with 1, (of what, measured, p-value), with a p-value for all of them."""
    of, measured, p = min(found, key=lambda one: one[2], default=("none", 1.0, 1.0))
    return Check(name, f"{measured:.4g} ({of})", "1", min(1.0, len(found) * p))


def _some_steps(x: np.ndarray, restart: int) -> np.ndarray:
    """All steps; of very many, the first ones and those around the restart."""
    if len(x) <= MOST:
        return x
    return np.concatenate([x[: MOST // 2], x[max(MOST // 2, restart - MOST // 4) : restart + MOST // 4]])


def _normal(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def _squares(x: np.ndarray) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def _chi2(value: float, freedom: int) -> float:
    """Two-sided."""
    from scipy import stats

    return min(1.0, 2 * min(float(stats.chi2.cdf(value, freedom)), float(stats.chi2.sf(value, freedom))))
