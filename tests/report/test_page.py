"""The report: complete, offline, escaped, and honest about what the guarantee covers."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpformer.data import Dataset
from dpformer.errors import DpformerError
from dpformer.format_number import percent, round_up
from dpformer.report import write_report
from dpformer.report.content import gather, popularity_group
from dpformer.runs import Config, finished, train
from dpformer.runs.tuning import restated
from tests.tiny_runs import CHOICES, EVIL, copied, point_at, tiny_run

VOID = {"meta", "line", "rect", "circle", "polyline", "br"}


class Page(HTMLParser):
    """Text, attributes, and whether every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory)


def words(page: Path) -> str:
    return re.sub(r"\s+", " ", " ".join(Page(page.read_text()).text))


def test_the_page_says_it_all(run: Path, tmp_path: Path) -> None:
    page = write_report(run, out=tmp_path / "page.html")
    text, facts = words(page), json.loads((run / "privacy.json").read_text())
    assert facts["private"]
    for sentence in (facts["headline"], *facts["words"], *facts["data"], *facts["not_covered"]):
        assert sentence in text
    for part in (
        "Privacy Facts",
        round_up(facts["epsilon"]),
        "NDCG@10",
        "HIT@10",
        "MRR",
        "Training loss",
        "Gradient norms",
    ):
        assert part in text
    for part in (
        "Budget spent",
        "HIT@10 by popularity of the item",
        "The long tail",
        "With Re-Attention",
        "learning_rate",
    ):
        assert part in text
    for example in gather(finished(run), public=True).examples:
        assert all(title in text for title in example.items)
    assert "log.csv" in text and str(run.parent) not in page.read_text(), "no path of a machine"


def test_it_loads_nothing_and_runs_nothing(run: Path, tmp_path: Path) -> None:
    html = write_report(run, out=tmp_path / "page.html", histories=[["i0"]]).read_text()
    page = Page(html)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert "://" not in html and "@import" not in html and "url(" not in html
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert EVIL not in html and "&lt;script&gt;" in html, "a title is text"
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_everything_outside_the_guarantee_is_marked(run: Path, tmp_path: Path) -> None:
    html = write_report(run, out=tmp_path / "page.html").read_text()
    sections = re.findall(r"<h2>\s*(.*?)</h2>", html, re.DOTALL)
    marks = {re.sub(r"<.*", "", s, flags=re.DOTALL).strip(): re.findall(r'badge (\w+)"', s) for s in sections}
    assert marks["Accuracy"] == marks["Training"] == ["out"]
    assert marks["The long tail"] == marks["Example histories"] == ["ok"]
    assert "Keep this page as private as the data" in html


def test_the_public_page_never_touches_the_data(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled = copied(run, tmp_path)
    (spoiled / "metrics.jsonl").unlink()
    monkeypatch.setattr(Dataset, "__post_init__", lambda self: pytest.fail("data was read"))
    text = words(write_report(spoiled, public=True))
    for private in ("Accuracy", "NDCG@10", "Training loss", "Gradient norms", "not covered by the guarantee "):
        assert private not in text
    assert "Privacy Facts" in text and "The long tail" in text


def test_the_tail_and_examples_come_from_the_release_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = finished(run)
    frequencies = opened.release.frequencies
    assert frequencies is not None
    content = gather(opened, public=True)
    popular = [opened.release.title(int(item)) for item in np.argsort(-frequencies, kind="stable")[:6]]
    assert content.examples[1].items == popular, "popular by the noisy release, not by counts"
    assert content.tail is not None and "never from raw counts" in content.tail.note


def test_histories_can_be_given_and_are_not_called_covered(run: Path, tmp_path: Path) -> None:
    page = write_report(run, out=tmp_path / "page.html", histories=[["i3", "i4"], []], public=True)
    text = words(page)
    assert "given by the author of this page" in text and "Title 4" in text
    assert not re.search(r"Example histories\s*<span", page.read_text())
    with pytest.raises(DpformerError, match="'nobody'"):
        write_report(run, out=tmp_path / "other.html", histories=[["nobody"]])
    assert not (tmp_path / "other.html").exists()


def test_data_that_has_moved_costs_the_accuracy_alone(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    spoiled = copied(tiny_run(tmp_path_factory), tmp_path)
    point_at(spoiled, tmp_path / "gone.csv")
    text = words(write_report(spoiled))
    assert "Not measured:" in text and "gone.csv does not exist" in text and "Training loss" in text


def test_a_run_without_privacy_says_so_in_red(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    html = write_report(tiny_run(tmp_path_factory, epsilon=math.inf), out=tmp_path / "page.html").read_text()
    assert "Not private." in html and "∞" in html and "covered by the guarantee</span>" not in html
    assert "in at most" not in html and 'class="badge bad"' in html and "Exact: this run is not private." in html
    seeded = write_report(tiny_run(tmp_path_factory, seed=1), out=tmp_path / "seeded.html").read_text()
    assert "Protects <b>nobody</b>" in html and "Protects <b>nobody</b>" in seeded
    assert "Void: the noise was seeded" in seeded and "covered by the guarantee</span>" not in seeded


@pytest.mark.parametrize("model", ["gru", "lstm"])
def test_models_without_attention(model: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    page = write_report(tiny_run(tmp_path_factory, model=model), out=tmp_path / "page.html")
    assert model.upper() in words(page) and "With Re-Attention" not in words(page)


def test_transition_counts(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    run = tiny_run(tmp_path_factory, model="counts", evaluate_every=0)
    text = words(write_report(run, out=tmp_path / "page.html"))
    assert "Transition counts" in text and "NDCG@10" in text
    assert "not private" not in text.lower() and "never from raw counts" in text


def test_a_language_model(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"to be or not to be {number}\n" for number in range(200)))
    choices = {**CHOICES, "file": corpus, "task": "lm", "unit": "line", "max_length": 12, "epochs": 1}
    train(Config.make(**choices), tmp_path / "run")
    text = words(write_report(tmp_path / "run"))
    assert "bits per character" in text and "Protects one line of the text" in text and "Clip norm per line" in text
    assert "NDCG" not in text and "Recommended next" not in text and "one user" not in text.lower()


def test_a_tuned_run_shows_the_cost_of_the_search(run: Path, tmp_path: Path) -> None:
    tuned = copied(run, tmp_path)
    facts = json.loads((tuned / "privacy.json").read_text())
    events = [{name: value for name, value in event.items() if name != "epsilon_alone"} for event in facts["events"]]
    facts = restated(facts, {"epsilon": 6.5, "mean_runs": 10, "events": events, "delta": facts["delta"]})
    (tuned / "privacy.json").write_text(json.dumps(facts))
    text = words(write_report(tuned, public=True))
    assert "Epsilon, ε 6.5 " in text and "Tuning (10 runs on average) 6.5" in text
    assert f"One run alone {round_up(facts['epsilon_one_run'])}" in text


def test_a_bad_folder_is_one_sentence(run: Path, tmp_path: Path) -> None:
    for spoil, says in (
        (lambda path: (path / "metrics.jsonl").write_text("{"), "metrics.jsonl cannot be read"),
        (lambda path: (path / "privacy.json").unlink(), "not finished"),
        (lambda path: (path / "model.safetensors").write_bytes(b"junk"), "not an intact dpformer model"),
        (lambda path: (path / "config.toml").unlink(), "not a run folder"),
    ):
        folder = copied(run, tmp_path / says.replace(" ", "-"))
        spoil(folder)
        with pytest.raises(DpformerError, match=says) as error:
            write_report(folder)
        assert "\n" not in str(error.value) and not (folder / "report.html").exists()


@given(st.lists(st.sampled_from([0.01, 0.02, 0.1, 0.2, 0.3, 0.5, 0.9]), min_size=1, max_size=60))
def test_groups_go_by_frequency_and_keep_equals_together(values: list[float]) -> None:
    p = np.array(values)
    group = popularity_group(p)
    lost = values.count(min(values)) > 1
    clear = [value for value in values if not (lost and value == min(values))]
    for item, value in enumerate(values):
        more = sum(other > value for other in clear)
        assert group[item] == (4 if value not in clear else 4 * more // len(clear))


def test_numbers_are_rounded_to_the_safe_side() -> None:
    assert percent(0.98201) == "98.3%" and percent(0.9996646) == "99.97%" and percent(0.9999999) == "99.99999%"
