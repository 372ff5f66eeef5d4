"""`dpformer audit` from outside."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dpformer.cli import app
from dpformer.errors import DpformerError
from dpformer.runs import train
from dpformer.training.optimizer import PrivateOptimizer
from tests.training.conftest import tiny_config
from tests.training.logs import write_log

SMALL = ["--users", "100", "--batch", "20", "--epochs", "6", "--canaries", "300", "--seed", "1"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["audit", *arguments])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audited")
    return train(tiny_config(write_log(folder / "log.csv"), clip_norm=0.5), folder / "run").folder


def test_a_table_and_a_verdict() -> None:
    result = run(*SMALL)
    assert result.exit_code == 0, result.output
    assert re.search(r"claimed ε for training: (5\.000|4\.99\d)", result.output)
    assert "noise: standard" in result.output and "Consistent with the claim" in result.output


def test_the_settings_of_a_run(done: Path, tmp_path: Path) -> None:
    result = run(str(done), "--canaries", "300", "--seed", "1", "--json", "--plot", str(tmp_path / "audit.svg"))
    assert result.exit_code == 0, result.output
    facts, claimed = json.loads(result.stdout), json.loads((done / "privacy.json").read_text())
    mechanisms = {one["of"]: one for one in facts["mechanisms"]}
    for name in ("noise_multiplier", "sample_rate", "steps", "clip_norm"):
        assert mechanisms["training"][name] == claimed[name]
    assert list(mechanisms) == [event["label"] for event in claimed["events"]], "every event of the ledger"
    assert facts["epsilon_claimed"] == pytest.approx(claimed["epsilon"])
    assert (tmp_path / "audit.svg").exists()


def test_a_fault_is_flagged_and_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivateOptimizer, "noise_std", property(lambda self: 0.5 * self.noise_multiplier))
    result = run(*SMALL, "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert not facts["passed"] and "noise: standard deviation" in facts["verdict"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "1", "--noise-multiplier", "2"], "give --epsilon or --noise-multiplier, not both"),
        (["--users", "10", "--batch", "20"], "batch is 20; it must be above 0 and at most the number of users, 10"),
        (["--epochs", "-1"], "epochs is -1; it must be above 0"),
        (["--canaries", "3"], "canaries is 3; fewer than 100 show nothing"),
        (["--plot", "x.txt"], "use .svg or .png"),
        (["nowhere", "--users", "9"], "--users and RUN exclude each other"),
        (["nowhere"], "nowhere is not a run folder"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str) -> None:
    error = run(*arguments).exception
    assert isinstance(error, DpformerError) and message in str(error) and "\n" not in str(error)


def test_a_run_without_noise_has_no_claim(tmp_path: Path) -> None:
    config = tiny_config(write_log(tmp_path / "log.csv"), epsilon=float("inf"), epochs=1)
    folder = train(config, tmp_path / "run").folder
    error = run(str(folder)).exception
    assert isinstance(error, DpformerError) and "trained without noise, so there is no claim to audit" in str(error)
