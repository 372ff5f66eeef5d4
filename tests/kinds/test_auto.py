"""`--model auto`: the rule, that it sees nothing but public numbers, and that a run says what was chosen."""

import json
import math
from pathlib import Path

import pytest

from dpformer.data import Dataset
from dpformer.kinds.auto import FEWEST_USERS, USERS_PER_ITEM, choose_model
from dpformer.runs.config import Config
from dpformer.runs.estimate import dry_run
from dpformer.runs.run import _decided, finished
from tests.tiny_runs import invoke
from tests.training.logs import write_log


@pytest.mark.parametrize(
    ("facts", "model"),
    [
        ({"users": 6000, "items": 400}, "transformer"),  # the synthetic default
        ({"users": 6040, "items": 3416}, "counts"),  # MovieLens-1M
        ({"users": 31013, "items": 23715}, "counts"),  # Games
        ({"users": 943, "items": 100}, "counts"),
        ({"users": 10**6, "items": None}, "counts"),
        ({"users": 6000, "items": 400, "attributes": 12}, "transformer"),
        ({"users": 100, "items": 10**4, "epsilon": math.inf}, "transformer"),
    ],
)
def test_the_rule(facts: dict[str, int], model: str) -> None:
    choice = choose_model(**facts)
    assert choice.model == model and choice.reason


def test_a_private_list_of_items_has_no_say() -> None:
    """Logs of any number of items get the same model, so neighbours do: the choice cannot tell them apart."""
    found = set()
    for items in (2, FEWEST_USERS // USERS_PER_ITEM, FEWEST_USERS // USERS_PER_ITEM + 1, 5000):
        dataset = Dataset.from_histories([[0, 1]] * FEWEST_USERS, items)
        config, _, reason = _decided(Config.make(file=Path("log.csv")), dataset)
        found.add((config.model, reason))
        given, cut, _ = _decided(Config.make(file=Path("log.csv"), assume_items_public=True), dataset)
        network = items <= FEWEST_USERS // USERS_PER_ITEM
        assert given.model == ("transformer" if network else "counts")
        assert cut.max_length == (200 if network else None)
    assert len(found) == 1


def test_a_run_says_what_was_chosen_and_why(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", users=60, items=20)
    done = invoke("train", log, "--epsilon", 50, "--assume-items-public", "--out", tmp_path / "r")
    assert done.exit_code == 0 and "model: counts, because 60 users" in done.stderr
    assert json.loads((tmp_path / "r" / "privacy.json").read_text())["model"] == "counts"
    assert finished(tmp_path / "r").config.model == "counts"
    assert "because 60 users" in (tmp_path / "r" / "config.toml").read_text().splitlines()[0]


def test_a_plan_is_of_what_would_be_chosen() -> None:
    facts = dry_run(Config.make())
    assert facts["model"] == "transformer" and facts["steps"] > 0
    assert dry_run(Config.make(file=Path("log.csv")), users=6000, items=400)["model"] == "counts"
