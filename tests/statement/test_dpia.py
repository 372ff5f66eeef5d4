"""The page for an officer: every number from the statement, risks under the headings of the two documents, blanks."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from dpformer.accounting import Gaussian, attack_rates, calibrate
from dpformer.format_number import percent, round_up
from dpformer.statement.cards.dpia import assessment
from dpformer.statement.cards.source import CardSource
from dpformer.statement.deployment import Deployment
from tests.tiny_runs import copied, printed, refused, tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401

HEADINGS = (
    "Extraction from the model", "Personal data obtained through queries", "Tests and resistance to attacks",
    "Legitimate interest", "Unlawful processing in development", "ε and unit", "Side channels", "Trust model",
    "Data collection exposure", "When a user withdraws", "Purpose and necessity", "Accepted by",
)  # fmt: skip


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory, model="counts", evaluate_every=0)


def test_the_page_of_a_run(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    path = Path(printed("card", folder, "--dpia").strip())
    text, facts = path.read_text(), json.loads((folder / "privacy.json").read_text())
    assert path == folder / "dpia.md" and facts["headline"] in text and facts["hashes"]["model"][:16] in text
    for heading in HEADINGS:
        assert heading in text, heading
    assert percent(facts["attack"]["true_positive_rate"]) in text and text.count("_____") >= 8
    assert f"ε = {round_up(facts['epsilon'])}" in text and "privacy.json" in text
    assert len(text.split()) < 1100, "it is to be one page, or two sides of one"
    assert all(line.count("|") in (0, 3, 5) for line in text.replace("\\|", "").splitlines()), "tables hold together"


def test_attack_rates_are_those_of_the_events(run: Path) -> None:
    facts = json.loads((run / "privacy.json").read_text())
    (event,) = facts["events"]
    noise = Gaussian(event["noise_multiplier"], label=event["label"])
    text = assessment(CardSource(facts, Deployment()))
    for alarms in (0.01, 0.001):
        rates = attack_rates([noise], facts["delta"], alarms)
        row = re.search(rf"falsely accuses {re.escape(percent(alarms))} [^|]*\| ([^|]+) \| ([^|]+) \| ([^|]+) \|", text)
        assert row is not None
        assert row.groups() == tuple(map(percent, (rates.true_positive_rate, *rates.precisions.values())))
    assert calibrate(epsilon=facts["epsilon"], delta=facts["delta"], sample_rate=1.0, steps=1) == pytest.approx(
        event["noise_multiplier"], rel=1e-3
    )


def test_the_owner_fills_blanks_and_cannot_break_the_page(run: Path) -> None:
    facts: dict[str, Any] = json.loads((run / "privacy.json").read_text())
    said = Deployment(name="Films | <b>x</b>", curator="Example", intended_use="Suggestions.", access="Two engineers.")
    text = assessment(CardSource(facts, said))
    assert "Films \\| &lt;b>x" in text and "Suggestions." in text and "Two engineers." in text and "<b>" not in text
    without = assessment(CardSource(facts, Deployment()))
    assert without.count("_____") > text.count("_____")


def test_without_a_guarantee_there_is_no_page(
    run: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    open_run = tiny_run(tmp_path_factory, epsilon=math.inf)
    assert "nothing to assess" in refused("card", open_run, "--dpia", "--out", tmp_path / "page.md")
    assert "one at a time" in refused("card", run, "--dpia", "--opendp")
    assert not list(tmp_path.iterdir())
