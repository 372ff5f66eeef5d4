"""Runs side by side: budgets of all together, paired differences, and a public page without exact numbers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpformer.accounting import epsilon_of
from dpformer.accounting.events import Event
from dpformer.data import Dataset
from dpformer.evaluation.metrics import ndcg
from dpformer.report import compare, write_comparison
from tests.browser import chromium
from tests.report.test_page import Page, words
from tests.tiny_runs import copied, point_at, printed, refused, tiny_run


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A network and counts of the same log; both runs are called `run`."""
    return [tiny_run(tmp_path_factory), tiny_run(tmp_path_factory, model="counts", evaluate_every=0)]


def test_budgets_metrics_and_settings_stand_side_by_side(runs: list[Path], tmp_path: Path) -> None:
    facts = json.loads(printed("compare", *runs, "--json"))
    statements = [json.loads((run / "privacy.json").read_text()) for run in runs]
    assert [run["epsilon"] for run in facts["runs"]] == [statement["epsilon"] for statement in statements]
    assert facts["settings"]["model"] == ["transformer", "counts"] and "epsilon" not in facts["settings"]
    assert len({run["name"] for run in facts["runs"]}) == 2, "names tell the runs apart"
    for run in facts["runs"]:
        for metric in run["accuracy"].values():
            assert metric["low"] <= metric["value"] <= metric["high"]
    assert facts["covered"] is False and not list(tmp_path.iterdir())
    text = printed("compare", *runs, "--out", tmp_path / "page.html")
    assert "Settings that differ" in text and "paired by user" in text and str(tmp_path / "page.html") in text


def test_all_together_cost_what_one_ledger_of_all_events_says(runs: list[Path]) -> None:
    together = compare(runs, public=True).together
    events: list[Any] = []
    for run in runs:
        for event in json.loads((run / "privacy.json").read_text())["events"]:
            event.pop("epsilon_alone")
            events.append(Event.from_dict(event))
    delta = sum(json.loads((run / "privacy.json").read_text())["delta"] for run in runs)
    assert together == {"epsilon": epsilon_of(events, delta), "delta": delta}
    one = json.loads((runs[0] / "privacy.json").read_text())["epsilon"]
    assert one < together["epsilon"] < 2 * one


def test_differences_are_paired_by_user(runs: list[Path]) -> None:
    comparison = compare(runs)
    assert comparison.same_test
    first, second = (side.measured.model for side in comparison.sides)  # type: ignore[union-attr]
    each = [[float(ndcg(of.ranks[u : u + 1])) for u in range(len(of.users))] for of in (first, second)]
    paired = np.array(each[1]) - np.array(each[0])
    found = comparison.differences[0]["ndcg@10"]
    assert found["value"] == pytest.approx(paired.mean()) and found["low"] < found["value"] < found["high"]
    naive = [np.random.default_rng(s).choice(paired, len(paired)).mean() for s in range(1000)]
    assert [found["low"], found["high"]] == pytest.approx(np.quantile(naive, [0.025, 0.975]), abs=0.02)


def test_the_public_page_reads_no_data(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dataset, "__post_init__", lambda self: pytest.fail("data was read"))
    page = write_comparison(compare(runs, public=True), tmp_path / "page.html")
    text = words(page)
    assert "NDCG" not in text and "not covered by the guarantee" not in text and "Budgets" in text
    html = page.read_text()
    assert not Page(html).tags & {"script", "link", "img", "iframe"} and "://" not in html


def test_a_run_whose_data_is_gone_and_one_that_is_not_private(
    runs: list[Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    moved = copied(runs[1], tmp_path)
    point_at(moved, tmp_path / "gone.csv")
    seeded = tiny_run(tmp_path_factory, seed=1)
    comparison = compare([runs[0], moved, seeded])
    text = words(write_comparison(comparison, tmp_path / "page.html"))
    assert "gone.csv does not exist" in text and "no one: not private" in text and "No guarantee holds" in text
    assert comparison.together is None and comparison.same_test is None and comparison.differences == []


def test_bad_input_is_one_sentence(runs: list[Path], tmp_path: Path) -> None:
    assert "two or more" in refused("compare", runs[0])
    assert "each once" in refused("compare", runs[0], runs[0])
    assert "not a run folder" in refused("compare", runs[0], tmp_path)


def test_it_fits_a_screen_and_a_phone(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(compare(runs), tmp_path / "page.html")
    with chromium() as browser:
        for width in (1280, 390):
            tab = browser.new_page(viewport={"width": width, "height": 900})
            tab.goto(page.as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            tab.screenshot(path=str(tmp_path / f"{width}.png"), full_page=True)
    assert re.search(r"2 runs side by side", page.read_text())
