"""`dpformer calibrate`: the table, JSON, and one sentence for each bad request."""

import json

import pytest
import typer
from typer.testing import CliRunner

from dpformer.cli.calibrate import calibrate
from dpformer.errors import DpformerError

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(calibrate)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_noise_of_a_budget() -> None:
    arguments = ("--users", "6040", "--batch", "1024", "--batch", "4096", "--epsilon", "8", "--json")
    assert json.loads(run(*arguments[:4], *arguments[6:]))["rows"][0]["delta"] == 1 / 60400
    facts = json.loads(run(*arguments, "--delta", str(1 / 6040)))
    rows = facts["rows"]
    assert facts["adjacency"] == "zero-out-one-user"
    assert [row["noise_multiplier"] for row in rows] == pytest.approx([2.3095, 4.4194], rel=0.005)
    assert [row["steps"] for row in rows] == [590, 148]
    assert all(row["epsilon"] <= 8 < row["epsilon_rdp"] and row["delta"] == 1 / 6040 for row in rows)


def test_epsilon_of_noise() -> None:
    arguments = ("--sample-rate", "0.01", "--steps", "1000", "--delta", "1e-5", "--noise-multiplier", "1")
    (row,) = json.loads(run(*arguments, "--json"))["rows"]
    assert row["epsilon"] == pytest.approx(1.8282, abs=4e-4) and row["epsilon_rdp"] == pytest.approx(2.1014, abs=2e-4)
    table = unwrapped(run(*arguments, "--noise-multiplier", "0"))
    assert "1.828" in table and "∞" in table and "Adding or removing one user's entire history" in table


def test_noise_that_is_correlated() -> None:
    arguments = ("--users", "6040", "--delta", "0.000166", "--batch", "512", "--epochs", "20", "--epsilon", "10")
    facts = json.loads(run(*arguments, "--bands", "8", "--json"))
    assert facts["bands"] == 8 and facts["rows"][0]["noise_multiplier"] == pytest.approx(1.75, abs=0.01)
    assert "with noise correlated over" in unwrapped(run(*arguments, "--bands", "8"))


def test_a_frequency_release_takes_its_part() -> None:
    arguments = ("--sample-rate", "0.1", "--epochs", "5", "--delta", "1e-5", "--noise-multiplier", "3", "--json")
    alone, joint = json.loads(run(*arguments)), json.loads(run(*arguments, "--frequency-noise", "8"))
    assert joint["rows"][0]["steps"] == 50
    assert joint["rows"][0]["epsilon"] > alone["rows"][0]["epsilon"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--users 10 --batch 5", "--epsilon"),
        ("--users 10 --batch 5 --epsilon 5 --noise-multiplier 1", "--epsilon"),
        ("--epsilon 5 --sample-rate 0.1", "--delta"),
        ("--epsilon 5 --users 10", "--batch"),
        ("--epsilon 5 --users 10 --batch 11", "11"),
        ("--epsilon 5 --users 0 --batch 1", "users is 0"),
        ("--epsilon 5 --users 10 --batch 5 --sample-rate 0.1", "not both"),
        ("--epsilon 5 --users 10 --batch 5 --epochs 1 --steps 4", "not both"),
        ("--epsilon 5 --users 10 --batch 5 --epochs -1", "-1"),
        ("--epsilon -1 --users 100 --batch 5", "epsilon .*-1"),
        ("--epsilon nan --users 100 --batch 5", "epsilon .*nan"),
        ("--epsilon 5 --users 100 --batch 5 --delta 2", "delta .*2"),
        ("--epsilon 5 --sample-rate 1.5 --delta 1e-5", r"sample_rate .*1\.5"),
        ("--epsilon 5 --sample-rate 0.5 --steps 0 --delta 1e-5", "steps .*0"),
        ("--noise-multiplier -1 --users 100 --batch 5", "noise_multiplier .*-1"),
    ],
)
def test_bad_requests_are_one_sentence(arguments: str, sentence: str) -> None:
    with pytest.raises(DpformerError, match=sentence):
        CliRunner().invoke(app, arguments.split(), catch_exceptions=False)
