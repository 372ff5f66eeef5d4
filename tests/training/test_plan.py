import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpformer.accounting import Gaussian, epsilon_of
from dpformer.errors import DpformerError
from dpformer.kinds.planning import other_events
from dpformer.noise import BandedGaussian
from dpformer.queries.transitions.rounds import LABEL as COUNTS
from dpformer.runs.config import Config
from dpformer.runs.planning import make_plan
from dpformer.training.plan import Plan


def plan_of(users: int = 6040, **choices: object) -> Plan:
    return make_plan(Config.make(**choices).resolve(users=users, threads=1), users)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(batch_size=1024, epochs=100, delta=1 / 6040)


@given(users=st.integers(10, 10**6), batch=st.integers(1, 4096), epochs=st.integers(1, 300))
def test_steps_are_exact(users: int, batch: int, epochs: int) -> None:
    """T = ⌈epochs·N/B⌉ in whole numbers: in floating point 93 users at B = 1 give a step too many or too few."""
    batch = min(batch, users)
    plan = plan_of(users, batch_size=batch, epochs=epochs, epsilon=math.inf)
    assert plan.steps == math.ceil(epochs * Fraction(users, batch))


def test_everything_together_is_within_the_budget(plan: Plan) -> None:
    assert (plan.steps, plan.sample_rate) == (590, 1024 / 6040)
    assert 0.99 * 5 < plan.epsilon <= 5
    assert plan.epsilon == epsilon_of(plan.events, 1 / 6040)
    assert epsilon_of([plan.training], plan.delta) < plan.epsilon, "the frequencies cost something"
    alone = plan_of(batch_size=1024, epochs=100, frequency_bias=False, reattention=False, delta=1 / 6040)
    assert alone.releases == () and alone.noise_multiplier == pytest.approx(3.2923, rel=5e-3)
    assert 1 < plan.noise_multiplier / alone.noise_multiplier < 1.01, "a hundredth of the budget is about 0.5% of σ"


def test_a_share_is_of_the_squared_gaussian_parameter() -> None:
    whole = Config.make(frequency_share=0.04).resolve(users=6040, threads=1)
    (event,) = other_events(whole)
    assert isinstance(event, Gaussian) and event.label == "frequencies"
    assert epsilon_of([Gaussian(event.noise_multiplier * math.sqrt(0.04))], 1 / 60400) == pytest.approx(5, rel=1e-3)


def test_a_released_list_of_items_is_in_the_ledger_with_its_delta() -> None:
    plan = plan_of(1000, file="log.csv", delta=1e-3, epochs=5)
    assert [event.label for event in plan.events] == ["items", "training"], "popularity comes with the list"
    items = plan.releases[0]
    assert items.failure == pytest.approx(1e-4)
    assert plan.epsilon <= 5 and plan.noise_of("items") == items.noise_multiplier
    assert plan.noise_of("nothing") is None
    for public in ({"catalog": "items.csv"}, {"assume_items_public": True}):
        events = plan_of(1000, file="log.csv", delta=1e-3, epochs=5, **public).events
        assert [event.label for event in events] == ["frequencies", "training"]
        assert not any(event.failure for event in events)


def test_a_network_that_starts_from_counts_gets_its_items_from_them() -> None:
    plan = plan_of(1000, file="log.csv", delta=1e-3, epochs=5, warm_start=0.5)
    assert [event.label for event in plan.events] == [COUNTS, "training"]
    assert plan.releases[0].failure == pytest.approx(1e-4) and plan.epsilon <= 5


def test_epsilon_spent_is_a_bound_at_every_step(plan: Plan) -> None:
    spent = [plan.spent(step) for step in range(plan.steps + 1)]
    assert spent == sorted(spent) and spent[-1] == plan.epsilon
    for step in (1, 40, 300, 589):
        assert spent[step] >= epsilon_of([*plan.releases, plan.training.repeated(step)], plan.delta) - 1e-9


def test_epsilon_spent_on_correlated_noise_goes_by_rounds() -> None:
    plan = plan_of(batch_size=512, epochs=5, bands=4, frequency_bias=False)
    (training,) = plan.events
    assert (plan.steps, training) == (59, BandedGaussian(plan.noise_multiplier, 512 / 6040, 59, 4, label="training"))
    spent = [plan.spent(step) for step in range(plan.steps + 1)]
    assert spent == sorted(spent) and spent[-1] == plan.epsilon <= 5
    assert spent[1] == spent[4] < spent[5] == spent[8] and plan.epsilon == epsilon_of(plan.events, plan.delta)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_without_privacy_nothing_is_claimed() -> None:
    plan = plan_of(epsilon=math.inf, model="transformer")
    assert (plan.noise_multiplier, plan.releases, plan.private) == (0, (), False)
    assert plan.epsilon == plan.spent(3) == math.inf


def test_a_seed_is_not_private() -> None:
    plan = plan_of(1000, seed=1, epochs=2)
    assert not plan.private and not any(event.private for event in plan.events)
    assert plan_of(1000, epochs=2).private


def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_dict(plan.to_dict()) == plan
    bare = plan_of(epsilon=math.inf, model="transformer")
    assert Plan.from_dict(bare.to_dict()) == bare


def test_counts_spend_the_budget_in_one_release() -> None:
    plan = plan_of(model="counts")
    assert plan.steps == 0 and plan.events == plan.releases == (Gaussian(plan.noise_multiplier, label=COUNTS),)
    assert plan.noise_multiplier == pytest.approx(0.8716, rel=1e-3) and 4.99 < plan.epsilon <= 5
    listed = plan_of(model="counts", file="log.csv")
    (event,) = listed.events
    assert event.failure == pytest.approx(0.1 * plan.delta), "a tenth of δ is for the threshold of the list of items"
    assert listed.noise_multiplier > plan.noise_multiplier and 4.99 < listed.epsilon <= 5


def test_an_impossible_budget_is_one_sentence() -> None:
    with pytest.raises(DpformerError, match="budget"):
        plan_of(100, epsilon=1000.0, epochs=1)
