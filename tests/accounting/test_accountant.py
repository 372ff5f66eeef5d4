"""ε against published constants, closed forms, brute force, and mistakes whose cost is known."""

import logging
import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpformer.accounting import Gaussian, Ledger, PoissonGaussian, accountant, epsilon_of
from dpformer.accounting.accountant import compose, epsilon_on_grid

N, B, SIGMA, STEPS = 6040, 1024, 3.2923, 590  # ε = 5.00 at δ = 1/N
Q = B / N


def training(sigma: float = SIGMA, q: float = Q, steps: int = STEPS, delta: float = 1 / N, **options: str) -> float:
    return epsilon_of([PoissonGaussian(sigma, q, steps)], delta, **options)


def test_known_constants() -> None:
    assert training(1.0, 0.01, 1000, 1e-5) == pytest.approx(1.8282, abs=4e-4)
    assert training(1.0, 0.01, 1000, 1e-5, accountant="rdp") == pytest.approx(2.1014, abs=2e-4)
    assert training() == pytest.approx(5.00, abs=0.005)


@pytest.mark.parametrize(
    ("mistake", "epsilon"),
    [
        ({"q": Q / 4}, 0.99),  # four micro-batches, each accounted as a batch of its own: reported ε
        ({"q": Q / 4, "steps": 4 * STEPS}, 2.19),
        ({"sigma": SIGMA / math.sqrt(2)}, 7.9),  # two ranks add σ/2 each; or C per group of two
        ({"sigma": SIGMA / 2}, 13.1),  # four ranks; or two users clipped together
        ({"sigma": SIGMA / math.sqrt(8)}, 23.1),
        ({"steps": 100 * math.ceil(N / B)}, 5.05),
        ({"sigma": 6.4289, "q": 4096 / N, "steps": 100 * math.ceil(N / 4096)}, 6.01),
        ({"steps": math.ceil(150 / Q)}, 6.39),
        ({"delta": 1 / (10 * N)}, 5.78),
    ],
)
def test_mistakes_have_their_known_cost(mistake: dict, epsilon: float) -> None:
    assert training(**mistake) == pytest.approx(epsilon, rel=0.006)


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [
        (1.0, 0.01, 1000, 1e-5),
        (0.8, 0.002, 500, 1e-6),
        (0.3, 0.01, 100, 1e-5),
        (50.0, 0.02, 1000, 1e-5),
        (2.0, 0.999, 50, 1e-5),
        (20.0, 0.5, 10**4, 1e-9),
        (5.0, 0.01, 1000, 1e-13),
        (5.0, 0.01, 1000, 1e-25),
    ],
)
def test_pld_is_never_above_rdp(sigma: float, q: float, steps: int, delta: float) -> None:
    pld, rdp = training(sigma, q, steps, delta), training(sigma, q, steps, delta, accountant="rdp")
    assert 0 < pld <= rdp < math.inf


def test_many_small_steps_are_not_overstated() -> None:
    """On dp-accounting's own grid of 10⁻⁴ this is 0.0488, above even RDP's 0.0368."""
    assert training(4.0, 1e-4, 10**5, 1e-6) == pytest.approx(0.0266, rel=0.005)


def delta_of_one_step(sigma: float, q: float, epsilon: float) -> float:
    """δ(ε) of one Poisson-sampled Gaussian by integration: the larger of removing and adding a user."""
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 2_000_001)
    without, mixed = (
        stats.norm.pdf(x, 0, sigma),
        (1 - q) * stats.norm.pdf(x, 0, sigma) + q * stats.norm.pdf(x, 1, sigma),
    )
    remove, add = mixed - math.exp(epsilon) * without, without - math.exp(epsilon) * mixed
    return float(max(np.trapezoid(np.maximum(remove, 0), x), np.trapezoid(np.maximum(add, 0), x)))


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (0.7, 0.01), (2.0, 0.6)])
def test_one_step_against_integration(sigma: float, q: float) -> None:
    delta = 1e-4
    epsilon = training(sigma, q, 1, delta)
    assert delta_of_one_step(sigma, q, epsilon * 1.0001 + 1e-6) <= delta
    assert delta_of_one_step(sigma, q, epsilon * 0.999) > delta


def exact_gaussian(sigma: float, delta: float) -> float:
    """ε of one Gaussian by bisection on Balle and Wang's formula."""

    def spent(epsilon: float) -> float:
        return stats.norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * stats.norm.cdf(
            -0.5 / sigma - epsilon * sigma
        )

    low, high = 0.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


@settings(max_examples=25)
@given(sigma=st.floats(0.2, 50), count=st.integers(1, 1000), delta=st.floats(1e-7, 0.1))
def test_gaussians_compose_in_closed_form(sigma: float, count: int, delta: float) -> None:
    wanted = exact_gaussian(sigma, delta)
    assert epsilon_of([Gaussian(sigma * math.sqrt(count), count)], delta) == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    everyone = PoissonGaussian(sigma * math.sqrt(count), 1.0, count)
    assert epsilon_of([everyone], delta) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("steps", [100, 10**4, 10**6])
@pytest.mark.parametrize("delta", [1e-3, 1e-7, 1e-9, 1e-10, 1e-12])
def test_rounding_never_hides_part_of_epsilon(steps: int, delta: float) -> None:
    """The same composition through the FFT must not fall below the closed form: plain PLD does, for many steps."""
    sigma = dp_accounting.get_sigma_gaussian(5.0, 1e-5) * math.sqrt(steps)
    sampled = [(dp_accounting.PoissonSampledDpEvent(1.0, dp_accounting.GaussianDpEvent(sigma)), steps)]
    exact = exact_gaussian(sigma / math.sqrt(steps), delta)
    assert epsilon_on_grid(sampled, delta, 2.0**-13) >= exact * (1 - 1e-9)


def test_events_compose_jointly_and_in_any_order() -> None:
    release, run = Gaussian(8.0), PoissonGaussian(SIGMA, Q, STEPS)
    both = epsilon_of([release, run], 1 / N)
    assert both == epsilon_of([run, release], 1 / N)
    assert training() < both < training() + epsilon_of([release], 1 / N)
    halves = [PoissonGaussian(SIGMA, Q, 200, label="before"), PoissonGaussian(SIGMA, Q, STEPS - 200, label="after")]
    assert epsilon_of([halves[0], release, halves[1]], 1 / N) == both
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=2e-4)
    accountant.compose(run.once(), STEPS).compose(release.once())
    assert both == pytest.approx(accountant.get_epsilon(1 / N), rel=1e-3)


def test_equal_events_are_counted_together() -> None:
    events = [PoissonGaussian(1.0, 0.1, 3), PoissonGaussian(1.0, 0.1, 4, label="x"), PoissonGaussian(1.0, 0.2, 1)]
    assert sorted(count for _, count in compose(events)) == [1, 7]
    (gaussian, count), *rest = compose([Gaussian(3.0, 2), Gaussian(4.0), PoissonGaussian(6.0, 1.0, 5)])
    assert not rest and count == 1
    assert gaussian.noise_multiplier == pytest.approx((2 / 9 + 1 / 16 + 5 / 36) ** -0.5)


def test_failure_probability_comes_off_delta() -> None:
    run = PoissonGaussian(1.0, 0.01, 1000)
    with_threshold = epsilon_of([run, Gaussian(1e6, delta=4e-6)], 1e-5)
    assert with_threshold == pytest.approx(epsilon_of([run], 6e-6), rel=1e-3)
    assert epsilon_of([run, Gaussian(1e6, 2, delta=6e-6)], 1e-5) == math.inf


def test_no_noise_is_no_privacy() -> None:
    assert epsilon_of([PoissonGaussian(0.0, 0.1, 1)], 1e-5) == math.inf
    assert epsilon_of([Gaussian(0.0), PoissonGaussian(1.0, 0.1, 1)], 1e-5) == math.inf
    assert epsilon_of([PoissonGaussian(0.0, 0.1, 0), Gaussian(0.0, 0)], 1e-5) == 0  # nothing happened
    assert epsilon_of([], 1e-5) == 0


@settings(max_examples=20)
@given(sigma=st.floats(0.3, 1e4), q=st.floats(1e-6, 1), steps=st.integers(1, 2000), exponent=st.floats(-30, -0.01))
def test_epsilon_is_a_number_at_every_edge(sigma: float, q: float, steps: int, exponent: float) -> None:
    """Pitfall: negative or NaN ε from an accountant at its edges."""
    epsilon = epsilon_of([PoissonGaussian(sigma, q, steps)], 10**exponent)
    assert epsilon >= 0  # NaN fails too


def test_negative_and_nan_answers_of_an_accountant_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountant, "_epsilon_of", accountant._epsilon_of.__wrapped__)  # remembers nothing
    for answer, wanted in ((math.nan, math.inf), (-0.3, 0.0)):
        for kind in (dp_accounting.pld.PLDAccountant, dp_accounting.rdp.RdpAccountant):
            monkeypatch.setattr(kind, "get_epsilon", lambda self, delta, answer=answer: answer)
        assert training() == wanted


@pytest.mark.parametrize("delta", [0, 1, -0.1, 1.5, math.nan, math.inf, "x", None, True])
def test_bad_delta_is_refused_by_value(delta: object) -> None:
    with pytest.raises(ValueError, match=f"delta.*{delta}"):
        epsilon_of([Gaussian(1.0)], delta)  # type: ignore[arg-type]


def test_unknown_accountants_are_refused() -> None:
    with pytest.raises(ValueError, match="gdp"):
        epsilon_of([Gaussian(1.0)], 1e-5, "gdp")


def test_no_log_line_reaches_the_user(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """At σ = 20, q = 0.5 dp-accounting warns about a dozen orders; other code's lines still pass."""
    with caplog.at_level(logging.DEBUG):
        Ledger([PoissonGaussian(20.0, 0.5, 1000)]).epsilon(1e-5)
        logging.getLogger("absl").warning("from elsewhere")
    assert [record.message for record in caplog.records] == ["from elsewhere"]
    assert capfd.readouterr() == ("", "")
