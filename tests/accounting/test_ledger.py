"""The ledger: what is recorded, counted together, saved and read back."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from dpformer.accounting import Gaussian, Ledger, PoissonGaussian, epsilon_of
from dpformer.noise import Banded


def example() -> Ledger:
    ledger = Ledger()
    ledger.gaussian(8.0, label="frequencies")
    ledger.gaussian(5.0, label="vocabulary", delta=1e-7)
    ledger.poisson_gaussian(3.3, sample_rate=0.1, steps=50, label="training")
    return ledger


def test_epsilon_is_of_all_events() -> None:
    ledger = example()
    assert ledger.epsilon(1e-5) == epsilon_of(ledger.events, 1e-5)
    assert ledger.epsilon(1e-5) > max(Ledger([event]).epsilon(1e-5) for event in ledger)
    assert ledger.epsilon(1e-5, "rdp") >= ledger.epsilon(1e-5)


def test_steps_recorded_one_by_one_are_the_plan_so_far() -> None:
    """Nothing grows and nothing is lost: 20 steps one at a time are 20 steps."""
    plan, spent = example(), Ledger(example().events[:2])
    for _ in range(20):
        spent.poisson_gaussian(3.3, sample_rate=0.1, steps=1, label="training")
    assert spent == plan.after(20, "training")
    assert len(spent) == 3
    assert plan.after(0, "training").epsilon(1e-5) < spent.epsilon(1e-5) < plan.epsilon(1e-5)
    assert plan.after(50, "training") == plan


def test_after_refuses_what_is_not_planned() -> None:
    with pytest.raises(ValueError, match=r"only 50 .*51"):
        example().after(51, "training")
    with pytest.raises(ValueError, match="0 events have the label 'x'"):
        example().after(5, "x")


def test_only_equal_events_are_counted_together() -> None:
    ledger = Ledger([Gaussian(1.0), Gaussian(1.0, 2), Gaussian(1.0, label="a"), Gaussian(1.0, private=False)])
    ledger.extend(Ledger([Gaussian(1.0), PoissonGaussian(1.0, 0.1, 1), PoissonGaussian(1.0, 0.2, 1)]))
    assert [event.repeats for event in ledger] == [4, 1, 1, 1, 1]
    ledger.extend(ledger)  # itself
    assert [event.repeats for event in ledger] == [8, 2, 2, 2, 2]


def test_json_round_trip_is_exact() -> None:
    ledger = Ledger([*example(), PoissonGaussian(1 / 3, 1024 / 6040, 590, private=False)])
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger and again.events == ledger.events
    assert again.epsilon(1e-5) == ledger.epsilon(1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(extra=1),
        lambda facts: facts.pop("adjacency"),
        lambda facts: facts.update(adjacency="replace-one-user"),
        lambda facts: facts["events"][0].update(kind="laplace"),
        lambda facts: facts["events"][0].pop("kind"),
        lambda facts: facts["events"][0].update(sigma=1),
        lambda facts: facts["events"][0].pop("label"),
        lambda facts: facts["events"][0].update(noise_multiplier=-1),
        lambda facts: facts["events"][0].update(noise_multiplier="8"),
        lambda facts: facts["events"][0].update(count=1.5),
        lambda facts: facts["events"][0].update(private="yes"),
        lambda facts: facts["events"][2].update(sample_rate=1.5),
        lambda facts: facts["events"][2].update(steps=True),
        lambda facts: facts["events"].append(3),
    ],
)
def test_json_is_strict(change: object) -> None:
    facts = json.loads(example().to_json())
    change(facts)  # type: ignore[operator]
    with pytest.raises(ValueError):
        Ledger.from_json(json.dumps(facts))


def test_seeds_and_missing_noise_show() -> None:
    assert example().private
    assert not Ledger([*example(), Gaussian(1.0, private=False)]).private
    assert not Ledger([PoissonGaussian(0.0, 0.1, 10)]).private
    assert Ledger([PoissonGaussian(0.0, 0.1, 10)]).epsilon(1e-5) == math.inf


def test_numbers_of_numpy_are_numbers() -> None:
    ledger = Ledger([PoissonGaussian(np.float64(1.5), np.float64(0.1), np.int64(10))])
    assert Ledger.from_json(ledger.to_json()) == ledger == Ledger([PoissonGaussian(1.5, 0.1, 10)])


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(-1, 0.1, 1), (math.nan, 0.1, 1), (1, 0, 1), (1, 2, 1), (1, 0.1, -1)]
)
def test_bad_events_are_refused(sigma: float, rate: float, steps: int) -> None:
    with pytest.raises(ValueError):
        Ledger().poisson_gaussian(sigma, rate, steps)
    with pytest.raises(TypeError):
        Ledger([("gaussian", 1.0)])  # type: ignore[list-item]


def test_events_of_correlated_noise_are_known_without_importing_noise_first() -> None:
    text = Ledger([Banded(4).event(1.0, 0.01, 8)]).to_json()
    code = f"from dpformer.accounting import Ledger; print(Ledger.from_json({text!r}).to_json() == {text!r})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "True"
