import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpformer.accounting import Gaussian, PoissonGaussian, epsilon_of
from dpformer.format_number import round_up
from dpformer.statement.build import statement

EVENTS = (Gaussian(8.0, label="frequencies"), PoissonGaussian(1.2, 0.1, 20, label="training"))


def make(events: Any = EVENTS, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "delta": 1e-3,
        "target": 4.0,
        "clipping": "normalize",
        "clip_norm": 0.5,
        "expected_batch_size": 100,
        "users": 1000,
        "seeded": False,
        "data": ["The vocabulary is public."],
        "hashes": {"config": "c"},
    }
    return statement(events, **{**facts, **changes})


def test_epsilon_is_that_of_the_ledger_not_of_the_plan() -> None:
    facts = make()
    assert facts["epsilon"] == epsilon_of(EVENTS, 1e-3) < facts["epsilon_target"] == 4
    assert facts["private"] and facts["adjacency"].startswith("zero-out: adding or removing one user's entire history")
    assert "noise of standard deviation 0.6 was added" in " ".join(facts["words"]), "σ·C on the sum"
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


def test_a_ledger_that_spent_more_than_was_asked_for_makes_no_statement() -> None:
    """150 epochs instead of 100, a release forgotten in the calibration: never under the old headline."""
    with pytest.raises(ArithmeticError, match="more than the target 4"):
        make((EVENTS[0], EVENTS[1].repeated(200)))
    with pytest.raises(ArithmeticError):
        make((*EVENTS, Gaussian(0.1)))
    with pytest.raises(ArithmeticError):
        make((*EVENTS, Gaussian(0.0)))


@pytest.mark.parametrize("changes", [{"seeded": True}, {"events": (Gaussian(8.0, private=False), EVENTS[1])}])
def test_one_seed_anywhere_and_nothing_is_promised(changes: dict[str, Any]) -> None:
    facts = make(**changes)
    assert facts["private"] is False and facts["headline"].startswith("NOT PRIVATE")
    assert "seed" in facts["random_source"] and "none of this is guaranteed" in facts["words"][0]


def test_without_noise_there_is_no_number_to_misread() -> None:
    facts = make((PoissonGaussian(0.0, 0.1, 20),), target=math.inf)
    assert facts["private"] is False and facts["headline"].startswith("NOT PRIVATE")
    assert [facts[name] for name in ("epsilon", "epsilon_target", "delta", "clip_norm", "clipping")] == [None] * 5
    assert facts["words"] == [facts["headline"]]


@given(st.floats(1e-6, 1e4))
def test_what_is_printed_is_never_less_than_what_was_spent(epsilon: float) -> None:
    assert float(round_up(epsilon)) >= epsilon * (1 - 1e-6) - 1e-12
    assert float(round_up(epsilon)) <= max(epsilon + 0.0011, epsilon * 1.00001)
