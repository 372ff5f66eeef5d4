"""Noise multipliers against the table of the design notes; certified; bad budgets refused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.accounting import Gaussian, Ledger, PoissonGaussian, calibrate, epsilon_of

# users, expected batch: noise multipliers at ε = 5, 8, 10 by PLD and by RDP; 100 epochs, δ = 1/users.
TABLE = {
    (6040, 256): ((1.7539, 1.2939, 1.1387), (1.8815, 1.3722, 1.2027)),
    (6040, 1024): ((3.2923, 2.3095, 1.9713), (3.5583, 2.4764, 2.1137)),
    (6040, 4096): ((6.4289, 4.4194, 3.7200), (6.9582, 4.7529, 3.9930)),
    (31013, 256): ((1.0173, 0.8161, 0.7476), (1.0670, 0.8478, 0.7744)),
    (31013, 1024): ((1.7022, 1.2525, 1.1026), (1.8116, 1.3194, 1.1559)),
    (31013, 4096): ((3.1851, 2.2195, 1.8906), (3.4145, 2.3630, 2.0050)),
}
ROWS = [
    (users, batch, epsilon, pld, rdp)
    for (users, batch), columns in TABLE.items()
    for epsilon, pld, rdp in zip((5, 8, 10), *columns, strict=True)
]


@pytest.mark.parametrize(("users", "batch", "epsilon", "pld", "rdp"), ROWS)
def test_table_of_noise_multipliers(users: int, batch: int, epsilon: float, pld: float, rdp: float) -> None:
    q, steps, delta = batch / users, math.ceil(100 * users / batch), 1 / users
    sigma = calibrate(epsilon=epsilon, delta=delta, sample_rate=q, steps=steps)
    assert sigma == pytest.approx(pld, rel=0.005)
    assert epsilon_of([PoissonGaussian(sigma, q, steps)], delta) <= epsilon  # certified
    assert epsilon_of([PoissonGaussian(rdp, q, steps)], delta, "rdp") == pytest.approx(epsilon, rel=0.005)


@pytest.mark.parametrize(("z", "extra"), [(8.0, 0.005), (3.5, 0.023), (20.0, 0.0007)])
def test_joint_with_a_release(z: float, extra: float) -> None:
    """A frequency release at z = 8 costs about 0.5% on σ, one at 3.5 about 2.3%, a noisy metric at 20 about 0.07%."""
    budget = {"epsilon": 5.0, "delta": 1 / 6040, "sample_rate": 1024 / 6040, "steps": 590}
    alone, joint = calibrate(**budget), calibrate(**budget, others=Ledger([Gaussian(z)]))
    assert joint / alone - 1 == pytest.approx(extra, abs=0.001)
    assert epsilon_of([Gaussian(z), PoissonGaussian(joint, 1024 / 6040, 590)], 1 / 6040) <= 5


def test_joint_with_a_failure_probability() -> None:
    budget = {"epsilon": 2.0, "delta": 1e-5, "sample_rate": 0.01, "steps": 500}
    other = Gaussian(30.0, delta=5e-6)
    sigma = calibrate(**budget, others=[other])
    assert sigma > calibrate(**budget)
    assert epsilon_of([other, PoissonGaussian(sigma, 0.01, 500)], 1e-5) <= 2


@settings(max_examples=5)
@given(epsilon=st.floats(0.05, 20), exponent=st.floats(-8, -3), q=st.floats(0.01, 1), steps=st.integers(10, 1000))
def test_certified_and_not_wasteful(epsilon: float, exponent: float, q: float, steps: int) -> None:
    delta = 10**exponent
    sigma = calibrate(epsilon=epsilon, delta=delta, sample_rate=q, steps=steps)
    assert 0.99 * epsilon < epsilon_of([PoissonGaussian(sigma, q, steps)], delta) <= epsilon


def test_a_search_that_ends_too_low_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is returned is certified by the accountant, whatever the search found."""
    monkeypatch.setattr("dpformer.accounting.calibration._search", lambda spent, epsilon, guess, stride: 3.25)
    sigma = calibrate(epsilon=5, delta=1 / 6040, sample_rate=1024 / 6040, steps=590)
    assert sigma > 3.29 and epsilon_of([PoissonGaussian(sigma, 1024 / 6040, 590)], 1 / 6040) <= 5


def test_extreme_deltas_are_calibrated_by_rdp() -> None:
    sigma = calibrate(epsilon=1, delta=1e-30, sample_rate=0.01, steps=1000)
    assert 0.99 < epsilon_of([PoissonGaussian(sigma, 0.01, 1000)], 1e-30) <= 1


def test_the_noise_is_what_is_printed() -> None:
    sigma = calibrate(epsilon=5, delta=1 / 6040, sample_rate=1024 / 6040, steps=590)
    assert float(f"{sigma:.5g}") == sigma


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("epsilon", value) for value in (0, -1, math.nan, math.inf, "5", None, True)],
        *[("delta", value) for value in (0, 1, -1e-5, 2, math.nan)],
        *[("sample_rate", value) for value in (0, -0.1, 1.0001, math.nan, math.inf)],
        *[("steps", value) for value in (0, -3, 10.0, 2.5, math.nan, True)],
    ],
)
def test_bad_values_are_refused_by_name_and_value(name: str, value: object) -> None:
    budget = {"epsilon": 5, "delta": 1e-5, "sample_rate": 0.1, "steps": 100} | {name: value}
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        calibrate(**budget)  # type: ignore[arg-type]


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="other events alone cost"):
        calibrate(epsilon=0.5, delta=1e-5, sample_rate=0.1, steps=10, others=[Gaussian(1.0)])
    with pytest.raises(ValueError, match=r"delta=0\.5"):
        calibrate(epsilon=1, delta=0.5, sample_rate=0.01, steps=10)
    with pytest.raises(ValueError, match=r"epsilon is 100000; it must be within 0\.001"):
        calibrate(epsilon=1e5, delta=1e-5, sample_rate=0.5, steps=10)
