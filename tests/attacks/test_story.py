"""Headline, statement, released file, report, model card, service and `verify` tell one story, whatever the list of
items is: private, a public catalogue, or given; δ, and what neighbours are, too."""

import html
import json
import re
from pathlib import Path

import pytest

from dpformer.format_number import plain, round_up
from dpformer.runs import Config, load_release, train
from tests.tiny_runs import invoke, printed, write_catalog
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this file)

LISTS = {
    "private": ({}, "was released from the data with differential privacy"),
    "catalogue": ({"catalog": "catalog.csv"}, "is a public catalogue"),
    "given": ({"assume_items_public": True}, "is assumed public: the guarantee does not cover which items occur"),
}


@pytest.fixture(scope="module", params=LISTS)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("story")
    write_catalog(folder / "catalog.csv")
    choices = {name: folder / value if name == "catalog" else value for name, value in LISTS[request.param][0].items()}
    log = write_log(folder / "log.csv", users=600, items=6)
    return request.param, train(Config.make(file=log, epsilon=8.0, threads=1, **choices), folder / "run").folder


def test_all_tell_the_same_story(told: tuple[str, Path], tmp_path: Path) -> None:
    name, run = told
    facts = json.loads((run / "privacy.json").read_text())
    headline, sentence = facts["headline"], LISTS[name][1]
    assert facts["delta"] == 1 / 6000 and facts["private"] and facts["epsilon"] <= 8
    assert f"ε = {round_up(facts['epsilon'])}, δ = {plain(facts['delta'], 3, up=True)}" in headline
    assert "under adding or removing one user's entire history" in headline
    assert headline.endswith(", given the item list.") is (name == "given") is ("given" in facts)
    assert [said for said in facts["data"] if sentence in said], facts["data"]

    places = {
        "model": json.dumps(load_release(run / "model.safetensors").metadata, ensure_ascii=False),
        "card": card(run, tmp_path),
        "report": page(run, tmp_path),
        "public report": page(run, tmp_path, "--public"),
        "verify": json.loads(printed("verify", run, "--json"))["headline"],
        "verify, as a table": " ".join(invoke("verify", run).stdout.split()),
    }
    for place, text in places.items():
        assert headline in text, place
    for place in ("card", "report", "public report"):
        assert any(said in places[place] for said in facts["data"] if sentence in said), f"{place} on the item list"
        assert all(said in places[place] for said in facts["words"]), place
        given = "that an item is in the model reveals that someone has it" in places[place]
        assert given is (name == "given"), place
    for place in ("report", "public report"):
        assert facts["adjacency"] in places[place], place


def card(run: Path, folder: Path) -> str:
    """The model card."""
    printed("card", run, "--out", folder / "README.md")
    return (folder / "README.md").read_text()


def page(run: Path, folder: Path, *options: str) -> str:
    """The text of a report."""
    path = folder / "report.html"
    printed("report", run, "--out", path, *options)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", path.read_text())).split())


def test_the_service_shows_the_statement(told: tuple[str, Path]) -> None:
    pytest.importorskip("fastapi")
    from dpformer.serving.served import Served

    assert Served.open(told[1]).statement == json.loads((told[1] / "privacy.json").read_text())
