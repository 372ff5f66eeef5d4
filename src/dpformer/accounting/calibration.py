"""Calibration: the smallest noise multiplier with which training meets a budget, certified by the accountant."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dpformer.accounting.accountant import compose, epsilon_of, epsilon_on_grid, first_interval, quiet
from dpformer.accounting.arguments import delta_of, epsilon_budget, sample_rate_of, whole
from dpformer.accounting.events import Event, PoissonGaussian

if TYPE_CHECKING:
    from dpformer.noise import Noise

LEAST, MOST = 0.1, 1e7  # range of noise multipliers
TOLERANCE = 1e-4  # relative, of ε in the search; the result is certified afterwards
DIGITS = 5  # significant digits of the result, rounded up: what is printed is what is used


def calibrate(
    *,
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    others: Iterable[Event] = (),
    noise: "Noise | None" = None,
) -> float:
    """The smallest noise multiplier σ such that `steps` Poisson-sampled noisy sums, and all `others`, are (ε, δ)-DP.

    >>> calibrate(epsilon=5, delta=1 / 6040, sample_rate=1024 / 6040, steps=590)
    3.2941

    σ applies to the *sum* of the users' clipped gradients, in units of the clip norm; the number of micro-batches per
    batch plays no role. The result is certified: `epsilon_of` at it is at most ε.

    Args:
        epsilon: total ε.
        delta: total δ; far below 1 / number of users, which would allow publishing one user at random.
        sample_rate: q, the probability that one user is in a batch: expected batch size / number of users.
        steps: T, the number of batches; ceil(epochs / q).
        others: events besides training (a `Ledger`, or the event of a frequency query), composed jointly.
        noise: how the noise of steps is correlated, such as `Banded(8)`; by default it is independent.
    """
    epsilon, delta = epsilon_budget(epsilon), delta_of(delta)
    sample_rate, steps = sample_rate_of(sample_rate), whole("steps", steps, 1)
    event = PoissonGaussian if noise is None else noise.event
    once = event(1.0, sample_rate, steps)
    rate, times = once.rate, once.compositions
    others = list(others)
    if others and (spent := epsilon_of(others, delta)) >= epsilon:
        raise ValueError(f"the other events alone cost ε = {spent:.4g} of {epsilon:g}: give them more noise")

    def events(sigma: float) -> list[Event]:
        return [*others, event(sigma, sample_rate, steps)]

    def spent_on(sigma: float) -> float:
        return epsilon_on_grid(compose(events(sigma)), left, interval)

    left = delta - sum(event.repeats * event.failure for event in others)
    if rate < 1 and left >= -math.expm1(times * math.log1p(-rate)):
        raise ValueError(
            f"delta={delta:g} is not below the probability that a user takes part at all: choose a smaller delta"
        )
    sigma = _guess(epsilon, left, rate, times)
    interval = first_interval(compose(events(sigma)), epsilon)
    aim, stride = epsilon, 0.1
    for _ in range(3):  # search on a coarse grid, which overestimates ε slightly; correct the target by the accurate ε
        sigma = _search(spent_on, aim, sigma, stride)
        accurate = epsilon_of(events(sigma), delta)
        if 0.999 * epsilon <= accurate <= epsilon:
            break
        aim, stride = aim * (1 - 2 * TOLERANCE) * epsilon / accurate, 0.01
    return _certify(lambda s: epsilon_of(events(s), delta), epsilon, sigma)


def _guess(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Initial guess: the central limit of DP-SGD, μ = q·√(T·(e^{1/σ²} − 1)). Not an accountant (it understates ε)."""
    import dp_accounting

    mu = 1 / dp_accounting.get_sigma_gaussian(epsilon, delta)
    return 1 / math.sqrt(math.log1p(mu**2 / (sample_rate**2 * steps)))


def _search(spent: Callable[[float], float], epsilon: float, guess: float, stride: float) -> float:
    """σ with spent(σ) just below ε: bracketing, then false position on log ε over log σ, which is nearly linear."""

    def excess(log_sigma: float) -> float:
        value = spent(math.exp(log_sigma))
        return math.log(min(max(value, 1e-9 * epsilon), 1e9 * epsilon) / epsilon) + TOLERANCE

    with quiet():
        (low, above), (high, below) = _bracket(excess, math.log(min(max(guess, LEAST), MOST)), stride)
        for _ in range(8):
            share = min(max(above / (above - below), 0.02), 0.98)
            middle = low + share * (high - low)
            value = excess(middle)
            if value > 0:
                low, above = middle, value
            else:
                high, below = middle, value
            if abs(value) < TOLERANCE:
                return math.exp(middle)
        return math.exp(high)


def _bracket(
    excess: Callable[[float], float], start: float, stride: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Two points with their excess, above 0 at the first and not at the second, found with growing strides."""
    here = (start, excess(start))
    while True:
        up = here[1] > 0
        there = here[0] + (stride if up else -stride)
        if not math.log(LEAST) < there < math.log(MOST):
            raise ValueError(
                f"this budget needs a noise multiplier outside {LEAST:g}..{MOST:g}: no useful guarantee, or no useful "
                "training; choose another epsilon or delta"
            )
        next_ = (there, excess(there))
        if (next_[1] > 0) != up:
            return (here, next_) if up else (next_, here)
        here, stride = next_, 2 * stride


def _certify(spent: Callable[[float], float], epsilon: float, sigma: float) -> float:
    """σ rounded up, and increased until the certified ε is within the budget."""
    for _ in range(100):
        sigma = _round_up(sigma)
        if (value := spent(sigma)) <= epsilon:
            return sigma
        sigma *= min(max(math.sqrt(value / epsilon), 1 + TOLERANCE), 1.1)
    raise ArithmeticError(f"no noise multiplier up to {sigma:g} could be certified for epsilon={epsilon:g}")


def _round_up(value: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - DIGITS)
    return round(math.ceil(value / unit * (1 - 1e-12)) * unit, 12)
