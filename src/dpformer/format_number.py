"""Numbers for readers: 2,981 instead of 2.98e+03. Bounds on privacy losses are rounded up."""

import math
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context

LONG = 12  # maximum number of digits before or after the point


def plain(value: float, digits: int = 4, *, up: bool = False) -> str:
    """A number with this many significant digits and thousands separators.

    >>> plain(2980.96), plain(0.00016556, 3), plain(1.0), plain(12345678.9, up=True)
    ('2,981', '0.000166', '1', '12,350,000')
    """
    if not math.isfinite(value):
        return "∞" if value > 0 else str(value)
    rounded = Context(prec=digits, rounding=ROUND_CEILING if up else ROUND_HALF_EVEN).create_decimal(repr(float(value)))
    if value and not -LONG <= rounded.adjusted() < LONG:
        return f"{rounded.normalize():e}".replace("e+", "e")
    text = f"{rounded:,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def small(probability: float, digits: int = 3) -> str:
    """A probability such as δ, rounded up; below a thousandth in scientific notation.

    >>> small(1.6556e-05), small(1e-6), small(0.01), small(0.0123456)
    ('1.66e-05', '1e-06', '0.01', '0.0124')
    """
    if not 0 < probability < 1e-3:
        return plain(probability, digits, up=True)
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(probability)))
    return f"{float(rounded):.{digits}g}"


def percent(share: float) -> str:
    """A share, rounded up, and never shown as certain unless it is.

    >>> percent(0.147247), percent(0.01), percent(0.9996646), percent(0.9999999996), percent(1.0)
    ('14.8%', '1%', '99.97%', 'over 99.99999%', '100%')
    """
    if share >= 1:
        return "100%"
    for digits in range(1, 8):
        shown = math.ceil(share * 10 ** (digits + 2) - 1e-9)
        if shown < 10 ** (digits + 2):
            return f"{shown / 10**digits:.{digits}f}".removesuffix(".0") + "%"
    return "over 99.99999%"


def one_in(probability: float) -> str:
    """A small probability as one case in a number, never understated: '1 in 6,040'."""
    return f"1 in {math.floor(1 / probability + 1e-6):,}"


def power_of_e(exponent: float) -> str:
    """e to this power, rounded up; beyond a billion only its order of magnitude."""
    if exponent < math.log(1e9):
        return plain(math.exp(exponent), up=True)
    return f"10 to the power {math.ceil(exponent / math.log(10))}"


def round_up(epsilon: float) -> str:
    """ε to three decimals, rounded up: never below what was spent."""
    return f"{math.ceil(epsilon * 1000 - 1e-9) / 1000:.3f}".rstrip("0").rstrip(".")
