"""ε of a list of events at a given δ, by privacy loss distributions (PLD), never below the truth.

The accountant is dp-accounting's. Three things are added around it, each because the plain call can mislead:

- *The grid.* A PLD is rounded pessimistically to a grid of privacy losses. One fixed interval is slow for large ε and
loose for small ε or many steps (0.049 instead of 0.027 for 10⁵ steps at q = 10⁻⁴, σ = 4). Here the grid follows ε
and is refined until that no longer matters. Every grid gives an upper bound, so the smallest one is used.
- *Rounding.* T-fold composition by FFT has an absolute error of about 10⁻¹⁷·T in δ, of either sign: at T = 10⁶ and
  δ = 10⁻¹⁰ the plain call reports ε 0.3% too low. ε is therefore computed at δ − 10⁻¹⁵·T. Where that is not a small
  part of δ, Rényi accounting (RDP), looser but without FFT, gives the answer.
- *Gaussians*, unsampled, compose to one Gaussian with 1/σ² = Σ 1/σ_i², whose ε has a closed form (Balle and Wang 2018).
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

from dpformer.accounting.arguments import delta_of
from dpformer.accounting.events import Event

if TYPE_CHECKING:
    from dp_accounting import DpEvent, PrivacyAccountant

ACCOUNTANTS = ("pld", "rdp")
COARSE = 1e-3  # first grid interval, in units of ε
DRIFT = 0.06  # with T compositions the interval is at most DRIFT/√T in units of ε: the error goes with T·interval²
SETTLED = 0.03  # a grid is fine enough if one 4× coarser differs by less: it has 16 times the error
POINTS = 2**19  # maximum number of losses on a grid
ROUNDING = 1e-15  # error of δ per composition; about 100 times what is observed

Composition = list[tuple["DpEvent", int]]


def epsilon_of(events: Iterable[Event], delta: float, accountant: str = "pld") -> float:
    """ε ≥ 0 such that all events together are (ε, δ)-DP under adding or removing one user's data; inf
    without noise.

    Args:
        events: everything that touched the data; a `Ledger` or any collection of events.
        delta: total δ, strictly between 0 and 1.
        accountant: "pld" (tight) or "rdp" (looser; to cross-check).
    """
    events = [event for event in events if event.repeats]
    delta = delta_of(delta) - sum(event.repeats * event.failure for event in events)
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {accountant!r}")
    if delta <= 0 or any(event.noise_multiplier == 0 for event in events):
        return math.inf
    if not events:
        return 0.0
    return _epsilon_of(tuple(compose(events)), delta, accountant)


@lru_cache(maxsize=1024)  # calibration, plan and statement ask for the same events
def _epsilon_of(events: tuple[tuple["DpEvent", int], ...], delta: float, accountant: str) -> float:
    import dp_accounting

    from dpformer.accounting.renyi import RenyiAccountant

    composition = list(events)
    with quiet():
        renyi = _ask(RenyiAccountant(), composition, delta)
        if accountant == "rdp":
            return renyi
        if len(composition) == 1 and isinstance(composition[0][0], dp_accounting.GaussianDpEvent):
            return float(dp_accounting.get_epsilon_gaussian(composition[0][0].noise_multiplier, delta))
        return min(renyi, _pld_epsilon(composition, delta, renyi))


def compose(events: Iterable[Event]) -> Composition:
    """Convert to dp-accounting events in canonical order, with equal events counted together and Gaussians merged."""
    import dp_accounting

    counts: Counter[DpEvent] = Counter()
    precision = 0.0  # Σ 1/σ² of the unsampled Gaussians
    for event in events:
        once = event.once()
        if isinstance(once, dp_accounting.GaussianDpEvent):
            precision += event.compositions / once.noise_multiplier**2
        else:
            counts[once] += event.compositions
    if precision:
        counts[dp_accounting.GaussianDpEvent(1 / math.sqrt(precision))] = 1
    return sorted(counts.items(), key=repr)


def epsilon_on_grid(composition: Composition, delta: float, interval: float) -> float:
    """ε with privacy losses rounded up to multiples of `interval`; by RDP where PLD gives no reliable answer."""
    import dp_accounting

    from dpformer.accounting.renyi import RenyiAccountant

    trusted = delta - ROUNDING * (10 + sum(count for _, count in composition))
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=interval)
    if trusted < delta / 2 or not all(accountant.supports(event) for event, _ in composition):
        return _ask(RenyiAccountant(), composition, delta)
    return _ask(accountant, composition, trusted)


def first_interval(composition: Composition, epsilon: float) -> float:
    """The first interval to try for an ε of this size: a power of two, so that similar values share it."""
    steps = sum(count for _, count in composition)
    wanted = epsilon * min(COARSE, DRIFT / math.sqrt(steps))
    return 2.0 ** math.floor(math.log2(max(wanted, _widest_loss(composition) / POINTS)))


def _pld_epsilon(composition: Composition, delta: float, renyi: float) -> float:
    if renyi == 0:
        return 0.0
    interval = first_interval(composition, min(renyi, 1e4))
    best, settled = epsilon_on_grid(composition, delta, interval), False
    while not settled and _widest_loss(composition) / interval < POINTS / 4:
        interval /= 4
        finer = epsilon_on_grid(composition, delta, interval)
        settled = finer >= (1 - SETTLED) * best
        best = min(best, finer)
    return best


def _widest_loss(composition: Composition) -> float:
    """A bound on the privacy loss of one repetition: for a Gaussian at 10σ, l = (1/2 + 10σ)/σ², and of a
    sampled Gaussian ln(1 − q + q·eˡ)."""
    widest = 0.0
    for event, _ in composition:
        sigma = getattr(getattr(event, "event", event), "noise_multiplier", math.inf)
        loss, q = (
            (0.5 + 10 * sigma) / sigma**2 if math.isfinite(sigma) else 0.0,
            getattr(event, "sampling_probability", 1),
        )
        widest = max(widest, loss + math.log(q + (1 - q) * math.exp(-loss)))
    return widest


def _ask(accountant: "PrivacyAccountant", composition: Composition, delta: float) -> float:
    for event, count in composition:
        accountant.compose(event, count)
    epsilon = float(accountant.get_epsilon(delta))
    if math.isnan(epsilon):
        return math.inf  # outside its range an accountant gives no guarantee
    return max(epsilon, 0.0)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide dp-accounting's log messages (about orders that did not converge and are left out)."""
    mine = threading.get_ident()  # messages of other threads are not hidden

    def others(record: logging.LogRecord) -> bool:
        return record.thread != mine

    logger = logging.getLogger("absl")
    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)
