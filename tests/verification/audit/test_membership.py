"""The attack on the released model: it stays below the bound of an honest run, and exceeds that of a lie."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpformer.runs import train
from dpformer.verification.audit import membership
from dpformer.verification.audit.membership import attack_membership
from tests.tiny_runs import invoke, printed, refused
from tests.training.conftest import tiny_config
from tests.training.memo import accountant_remembers  # noqa: F401

ITEMS, USERS = 400, 300


def write_users(path: Path, seed: int, name: str = "u", length: int = 8) -> Path:
    """Users with random items: what is known about one says nothing about another."""
    chance = np.random.default_rng(seed)
    lines = [
        f"{name}{user},i{item},{place}"
        for user in range(USERS)
        for place, item in enumerate(chance.choice(ITEMS, length, replace=False))
    ]
    path.write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n")
    return path


def run_on(folder: Path, **changes: Any) -> Path:
    catalog = folder / "catalog.csv"
    catalog.write_text("item_id\n" + "".join(f"i{item}\n" for item in range(ITEMS)))
    log = write_users(folder / "log.csv", 1)
    return train(tiny_config(log, catalog=catalog, seed=None, **changes), folder / "run").folder


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on(tmp_path_factory.mktemp("honest"), model="counts", epsilon=2.0)


def attacked(run: Path, outside: Path) -> dict[str, Any]:
    return json.loads(invoke("audit", run, "--non-members", outside, "--seed", 0, "--json").stdout)


def test_an_honest_run(honest: Path, tmp_path: Path) -> None:
    outside = write_users(tmp_path / "outside.csv", 2, "v")
    found = attacked(honest, outside)
    statement = json.loads((honest / "privacy.json").read_text())
    assert found["passed"] and found["members"] == found["non_members"] == USERS
    assert found["accused_non_members"] <= 3 and found["false_alarms_at_most"] > 0.01
    assert found["found_between"][0] <= found["found"] <= found["found_between"][1]
    assert found["bound"] > statement["attack"]["true_positive_rate"], "at a few more false alarms than 1 in 100"
    assert "for the owner of the data alone" in found["note"] and found["covered"] is False
    said = printed("audit", honest, "--non-members", outside)
    assert "bound on any attack" in said and "not to be published" in said
    assert not (honest / "audit.json").exists(), "an exact statistic of the data stays out of what may be published"


def test_a_model_with_less_noise_than_stated_is_found_out(honest: Path, tmp_path: Path) -> None:
    """The statement says ε = 2, the counts have noise for ε = 50: the answers alone tell."""
    run = run_on(tmp_path, model="counts", epsilon=50.0)
    outside = write_users(tmp_path / "outside.csv", 2, "v")
    assert attacked(run, outside)["passed"], "as long as it says so"
    (run / "privacy.json").write_bytes((honest / "privacy.json").read_bytes())
    found = attacked(run, outside)
    assert not found["passed"] and found["verdict"].startswith("FLAGGED") and found["found"] > 0.5
    assert invoke("audit", run, "--non-members", outside).exit_code == 1


def test_text_that_was_learnt_by_heart_is_found_out(tmp_path: Path) -> None:
    """A model that answers with what members wrote."""
    chance = np.random.default_rng(0)
    inside, outside, others = (list(chance.integers(0, 50, (200, 20))) for _ in range(3))
    learnt = {tuple(text[:end]): int(text[end]) for text in inside for end in range(1, 20)}

    class Parrot:
        max_length = 40

        def scores(self, histories: Any) -> Any:
            import torch

            after = learnt.get(tuple(histories[0]), 0)
            return torch.nn.functional.one_hot(torch.tensor([after]), 50).double()

    class Released:
        model, vocabulary = Parrot(), [str(n) for n in range(50)]

    facts = {"epsilon": 1.0, "delta": 1e-4, "events": [GAUSSIAN]}
    found = attack_membership(Released(), facts, inside, outside, text=True)  # type: ignore[arg-type]
    assert not found.passed and found.found > 0.9
    none = attack_membership(Released(), facts, outside, others, text=True)  # type: ignore[arg-type]
    assert none.passed and none.found < 0.1


GAUSSIAN = {
    "kind": "gaussian",
    "noise_multiplier": 3.7,
    "label": "x",
    "private": True,
    "count": 1,
    "delta": 0.0,
    "epsilon_alone": 1.0,
}


def test_scores_by_chance_are_below_the_bound_and_a_gap_is_above() -> None:
    chance = np.random.default_rng(0)
    inside, outside = chance.normal(size=(2, 2000))

    def bound(alarms: float) -> float:
        return 3 * alarms

    found = membership._concluded(inside, outside, bound)
    assert found.passed and found.found == pytest.approx(0.01, abs=0.01)
    assert not membership._concluded(inside + 2.0, outside, bound).passed
    level = membership._concluded(np.zeros(2000), np.zeros(2000), bound)
    assert level.accused_members == level.accused_non_members == 0, "scores that are all the same accuse nobody"


def test_refusals(honest: Path, tmp_path: Path) -> None:
    again = write_users(tmp_path / "again.csv", 2)
    assert "user 'u0' is among the members too" in refused("audit", honest, "--non-members", again)
    few = tmp_path / "few.csv"
    few.write_text("\n".join(write_users(tmp_path / "v.csv", 2, "v").read_text().split("\n")[:81]) + "\n")
    assert "at least 200 of each" in refused("audit", honest, "--non-members", few)
    assert "leave it out" in refused("audit", honest, "--non-members", again, "--epsilon", 3)
    assert "needs RUN" in refused("audit", "--non-members", again)
    assert "read for --non-members alone" in refused("audit", honest, "--data", again)
