"""`dpformer epsilon`: bounds that hold, noise that is that of the mechanism, and figures that are in the store."""

import json
import math
from pathlib import Path

import pytest
from scipy.stats import norm

from dpformer.accounting import Gaussian, Ledger
from dpformer.accounting.choosing import ADVICE, choice, measured
from dpformer.runs.config import Config
from experiments import choosing
from tests.tiny_runs import printed, refused

DOCS = Path(__file__).parents[2] / "docs"


def test_it_shows_attacks_noise_and_accuracy() -> None:
    facts = json.loads(printed("epsilon", "--users", 100_000, "--json"))
    rows = facts["choices"]
    assert [row["epsilon"] for row in rows] == [0.5, 1, 2, 4, 8] and facts["delta"] == 1e-6
    for alarms in ("0.01", "0.001"):
        found = [row["members_found"][alarms] for row in rows]
        assert found == sorted(found) and float(alarms) < found[0] < found[-1] < 0.5
    assert [row["count_noise"] for row in rows] == sorted((row["count_noise"] for row in rows), reverse=True)
    text = printed("epsilon", "--users", 100_000)
    assert "MovieLens-1M" in text and "random accusations" in text and ADVICE.split(".")[0] in " ".join(text.split())


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_the_numbers_are_those_of_one_gaussian(epsilon: float) -> None:
    """Its trade-off curve is known, and √K is the norm of a user with K items."""
    one = choice(epsilon, 1e-6, 30)
    assert 0.999 * epsilon < Ledger([Gaussian(one.noise_multiplier)]).epsilon(1e-6) <= epsilon
    for alarms, found in one.found.items():
        exact = norm.cdf(norm.ppf(alarms) + 1 / one.noise_multiplier)
        assert exact <= found <= 1.02 * exact
    assert one.count_noise == pytest.approx(math.sqrt(30) * one.noise_multiplier)


def test_accuracy_is_what_the_store_has() -> None:
    assert measured() == choosing.measured(), "run python -m experiments.choosing"
    for facts in measured()["data"].values():
        kept = [entry["mean"] / facts["without_noise"] for entry in facts["by_epsilon"].values()]
        assert 0 < min(kept) <= max(kept) < 1
    assert choice(3.21, 1e-6).kept() == {}, "nothing is read between the lines"


def test_default_and_advice_agree() -> None:
    default = Config.model_fields["epsilon"].default
    assert f"Start from {default:g}, the default" in ADVICE
    assert f"why {default:g} is the default" in (DOCS / "privacy" / "choosing-epsilon.md").read_text(encoding="utf-8")


def test_bad_input_is_one_sentence() -> None:
    assert "--users" in refused("epsilon")
    assert "users is 1" in refused("epsilon", "--users", 1)
    assert "epsilon" in refused("epsilon", "--users", 100, "--epsilon", -1)
    assert "items_per_user" in refused("epsilon", "--users", 100, "--items-per-user", 0)
