"""Numbers for readers: readable, and never below the truth if they bound it."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpformer.format_number import one_in, plain, power_of_e, round_up


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2980.96, "2,981"), (1e-5, "0.00001"), (1 / 6040, "0.0001656"), (1.0, "1"), (0.0, "0"), (1024 / 6040, "0.1695"),
        (1e15, "1e15"), (2e-20, "2e-20"), (math.inf, "∞"), (100, "100"), (123456.0, "123,500"),
    ],
)  # fmt: skip
def test_plain(value: float, text: str) -> None:
    assert plain(value) == text


@given(st.floats(1e-11, 1e11), st.integers(3, 6))
def test_plain_rounded_up_is_never_less_and_near(value: float, digits: int) -> None:
    text = plain(value, digits, up=True)
    assert re.fullmatch(r"[\d,]+(\.\d+)?", text), "no letters"
    assert value <= float(text.replace(",", "")) <= value * (1 + 10.0 ** (2 - digits))


def test_powers_of_e() -> None:
    assert power_of_e(5) == "148.5" and power_of_e(8) == "2,981" and power_of_e(0) == "1"
    assert power_of_e(50) == "10 to the power 22" and power_of_e(5000) == "10 to the power 2172"


@given(st.floats(1e-12, 0.5))
def test_one_in_is_not_less_than_the_probability(probability: float) -> None:
    number = int(one_in(probability).removeprefix("1 in ").replace(",", ""))
    assert 1 / number >= probability * (1 - 1e-6)


def test_epsilon_is_rounded_up() -> None:
    assert round_up(4.9991) == "5" and round_up(4.2) == "4.2" and round_up(7.99864) == "7.999"
