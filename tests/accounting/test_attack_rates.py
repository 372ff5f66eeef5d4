"""What an attack can find: bounds that no attack exceeds, and that the best one nearly meets."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from dpformer.accounting import Gaussian, PoissonGaussian, attack_rates
from dpformer.accounting.attack_rates import attack_rates_at, attack_rates_of_search
from dpformer.accounting.searches import Search


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("alarms", [0.001, 0.01, 0.2])
def test_a_gaussian_has_a_closed_form(sigma: float, alarms: float) -> None:
    """The trade-off of N(0, σ²) and N(1, σ²) is known: Φ(Φ⁻¹(α) + 1/σ)."""
    found = attack_rates([Gaussian(sigma)], 1e-9, alarms).true_positive_rate
    exact = norm.cdf(norm.ppf(alarms) + 1 / sigma)
    assert exact <= found <= 1.01 * exact


def test_the_likelihood_ratio_attack_on_training_is_bounded_and_nearly_meets_the_bound() -> None:
    """By sampling: the best test there is, of 20 noisy sums in which the user was with probability q."""
    q, sigma, steps, n = 0.3, 1.0, 20, 200_000
    rng = np.random.default_rng(0)
    scores = np.zeros((2, n))
    for _ in range(steps):
        seen = sigma * rng.standard_normal((2, n))
        seen[1] += rng.random(n) < q
        scores += np.log(1 - q + q * np.exp((2 * seen - 1) / (2 * sigma**2)))
    attack = (scores[1] > np.quantile(scores[0], 0.99)).mean()
    bound = attack_rates([PoissonGaussian(sigma, q, steps)], 1e-6).true_positive_rate
    assert attack - 4 * math.sqrt(attack / n) < bound < 1.15 * attack


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 1e-9), (1.0, 0.1), (5.0, 1e-5)])
def test_one_epsilon_alone_is_met_by_randomised_response(epsilon: float, delta: float) -> None:
    """It shows the secret with probability δ, and else tells the truth e^ε times as often as not."""
    truth = (1 - delta) / (1 + math.exp(-epsilon))
    lie = 1 - delta - truth  # false alarms of an attack that believes it
    found = attack_rates_at(epsilon, delta or 1e-300, lie).true_positive_rate
    assert found == pytest.approx(delta + truth)


@given(epsilon=st.floats(0, 60), alarms=st.floats(1e-6, 0.5))
def test_accusations_are_worth_what_bayes_says(epsilon: float, alarms: float) -> None:
    rates = attack_rates_at(epsilon, 1e-9, alarms)
    assert alarms <= rates.true_positive_rate <= 1
    for prior, precision in rates.precisions.items():
        odds = prior / (1 - prior) * rates.true_positive_rate / alarms
        assert precision == pytest.approx(odds / (1 + odds)) and precision >= prior * (1 - 1e-9)


def test_more_releases_a_failure_and_no_noise_find_more() -> None:
    one, two = [Gaussian(2.0)], [Gaussian(2.0), Gaussian(2.0)]
    rates = [attack_rates(events, 1e-5).true_positive_rate for events in ([], one, two, [Gaussian(0.0)])]
    assert rates[0] == pytest.approx(0.01) and rates == sorted(rates) and rates[-1] == 1
    failing = attack_rates([Gaussian(2.0, delta=0.005)], 0.01).true_positive_rate
    assert failing == pytest.approx(rates[1] + 0.005, abs=1e-4)


def test_the_curve_says_more_than_its_end() -> None:
    """ε = 5 alone allows an attack that finds 99 % of the members; training with ε = 5 does not."""
    training = [PoissonGaussian(3.2941, 1024 / 6040, 590)]
    curve, end = attack_rates(training, 1 / 6040), attack_rates_at(5.0, 1 / 6040)
    assert curve.true_positive_rate == pytest.approx(0.147, abs=0.002) and end.true_positive_rate > 0.99


def test_a_search_finds_more_than_one_run() -> None:
    events = (Gaussian(2.0), Gaussian(20.0, label="score"))
    one = attack_rates(events, 1e-5).true_positive_rate
    search = attack_rates_of_search(Search(events, 10.0), 1e-5).true_positive_rate
    assert one < search < 1
