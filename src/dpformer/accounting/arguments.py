"""Validation of the numbers a guarantee rests on: errors name the argument, the value seen and what is allowed."""

import math
from numbers import Integral, Real

EPSILONS = (1e-3, 1e4)  # range of calibration: outside, either the guarantee or the training is useless


def _number(name: str, value: object, allowed: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # an integer with hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be {allowed}, not {number_text(value)}")
    return number


def positive(name: str, value: object) -> float:
    """A finite number above 0."""
    number = _number(name, value, "a finite number above 0")
    if number <= 0:
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}")
    return number


def not_negative(name: str, value: object) -> float:
    """A finite number, 0 or above."""
    number = _number(name, value, "a finite number, 0 or above")
    if number < 0:
        raise ValueError(f"{name} must be a finite number, 0 or above, not {value!r}")
    return number


def epsilon_budget(value: object) -> float:
    """ε to calibrate for: outside `EPSILONS`, accounting does not terminate or overflows."""
    number = positive("epsilon", value)
    if not EPSILONS[0] <= number <= EPSILONS[1]:
        raise ValueError(f"epsilon is {number:g}; it must be within {EPSILONS[0]:g} … {EPSILONS[1]:g}")
    return number


def delta_of(value: object, name: str = "delta") -> float:
    """δ: a number strictly between 0 and 1."""
    number = _number(name, value, "strictly between 0 and 1")
    if not 0 < number < 1:
        raise ValueError(f"{name} must be strictly between 0 and 1, not {value!r}; 1 / (10 · number of users) is usual")
    return number


def sample_rate_of(value: object) -> float:
    """q: the probability that one user is in a batch, in (0, 1]."""
    number = _number("sample_rate", value, "in (0, 1]")
    if not 0 < number <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], not {value!r}; it is expected batch size / number of users")
    return number


def whole(name: str, value: object, least: int) -> int:
    """An integer of at least `least`; floats are refused, since rounding a number of steps changes the guarantee."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def number_text(value: object) -> str:
    """The value as given, truncated if it has hundreds of digits."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
