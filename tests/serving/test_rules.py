"""Rules at request time: against a naive twin, in Python, on the command line and over HTTP."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpformer as dp
from dpformer.data.catalog_columns import CatalogColumns, read_columns
from dpformer.errors import DpformerError
from dpformer.runs.model_file import load_release
from dpformer.serving.ranking import Ranker
from dpformer.serving.rules import BoundRules, Cap, RuleBook, Rules, rule_book
from dpformer.serving.served import Served
from tests.tiny_runs import ITEMS, printed, refused, tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401

NONE = dict.fromkeys(("batch_size", "epochs", "dim", "blocks"))
COLOURS = ("red", "green", "blue")


def write_columns(path: Path) -> Path:
    """Item i has one colour, several shapes, a price; i0 has nothing."""
    rows = ["item_id,title,colour,shape,price,stock"]
    for item in range(ITEMS):
        shapes = "|".join(name for bit, name in enumerate(("round", "flat")) if item >> bit & 1)
        rows.append(f"i{item},T{item},{COLOURS[item % 3] if item else ''},{shapes},{item / 2},{item % 2 == 0}")
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    catalog = write_columns(tmp_path_factory.mktemp("columns") / "items.csv")
    return tiny_run(tmp_path_factory, model="counts", catalog=catalog, **NONE)


@pytest.fixture(scope="module")
def facts(run: Path) -> dict[str, dict[str, str]]:
    """The catalogue as a person would read it."""
    from dpformer.runs.config import Config

    catalog = Config.make(run / "config.toml").catalog
    assert catalog is not None
    with catalog.open() as file:
        return {row["item_id"]: row for row in csv.DictReader(file)}


def naive(
    order: list[str], facts: dict[str, dict[str, str]], k: int, allowed: Any = lambda _: True, **most: int
) -> list[str]:
    """All items in the order of their scores, one at a time."""
    used: dict[tuple[str, str], int] = {}
    chosen: list[str] = []
    for item in order:
        values = [(column, v) for column in most for v in facts[item][column].split("|") if v]
        if not allowed(item) or any(used.get(value, 0) >= most[value[0]] for value in values):
            continue
        for value in values:
            used[value] = used.get(value, 0) + 1
        chosen.append(item)
        if len(chosen) == k:
            break
    return chosen


@pytest.mark.parametrize(
    ("rules", "allowed", "most"),
    [
        ({"items": ["i3", "i5", "i7", "unknown"]}, lambda i, f: i in ("i3", "i5", "i7"), {}),
        ({"exclude": ["i3", "unknown"]}, lambda i, f: i != "i3", {}),
        ({"where": {"colour": "red"}}, lambda i, f: f["colour"] == "red", {}),
        ({"where": {"colour": ["Red", "blue"]}}, lambda i, f: f["colour"] in ("red", "blue"), {}),
        ({"where": {"shape": "flat"}}, lambda i, f: "flat" in f["shape"], {}),
        ({"where": {"price": {"min": 2, "max": 6.5}}}, lambda i, f: 2 <= float(f["price"]) <= 6.5, {}),
        ({"where": {"price": 3}}, lambda i, f: float(f["price"]) == 3, {}),
        ({"where": {"stock": True}}, lambda i, f: f["stock"] == "True", {}),
        ({"max_per": {"colour": 2}}, lambda i, f: True, {"colour": 2}),
        ({"max_per": {"colour": 3, "shape": 2}}, lambda i, f: True, {"colour": 3, "shape": 2}),
        (
            {"where": {"stock": True}, "max_per": {"colour": 1}, "exclude": ["i4"]},
            lambda i, f: f["stock"] == "True" and i != "i4",
            {"colour": 1},
        ),
    ],
)
def test_rules_choose_what_a_person_would(
    run: Path, facts: dict[str, dict[str, str]], rules: dict[str, Any], allowed: Any, most: dict[str, int]
) -> None:
    release = load_release(run / "model.safetensors")
    scores = np.random.default_rng(0).permutation(2 * ITEMS).reshape(2, ITEMS).astype(np.float32)  # no ties
    chosen, values = rule_book(release, run).bind(Rules(**rules)).choose(scores.copy(), 6)
    for user in range(2):
        ranked = [str(release.vocabulary[item]) for item in np.argsort(-scores[user])]
        there = values[user] > -np.inf
        assert [str(release.vocabulary[item]) for item in chosen[user][there]] == naive(
            ranked, facts, 6, lambda i: allowed(i, facts[i]), **most
        )
        assert (values[user][there] == scores[user][chosen[user][there]]).all()


@given(data=st.data(), k=st.integers(1, 12), most=st.integers(1, 3), items=st.integers(1, 300))
def test_caps_are_greedy_in_the_order_of_scores(data: st.DataObject, k: int, most: int, items: int) -> None:
    """With ties, items of many values and of none, and more rounds than one."""
    from dpformer.data.catalog_columns import _column

    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    cells = [
        "|".join(random.choice(list("abcdefgh"), random.choice([0, 1, 1, 1, 3]), replace=False)) for _ in range(items)
    ]
    few = ["x" if random.random() < 0.9 else "y" for _ in range(items)]
    scores = random.permutation(items).astype(np.float32)[None]
    order = [str(item) for item in np.argsort(-scores[0])]
    facts = {str(i): {"letters": cells[i], "few": few[i]} for i in range(items)}
    caps = (Cap(_column("letters", cells), most), Cap(_column("few", few), 5))
    chosen, values = BoundRules(None, caps).choose(scores.copy(), k)
    expected = naive(order, facts, k, letters=most, few=5)
    assert [str(i) for i, v in zip(chosen[0], values[0], strict=True) if v > -np.inf] == expected


def test_python_takes_rules(run: Path) -> None:
    rec = dp.load(run)
    assert isinstance(rec, dp.Recommender)
    found = rec.recommend({"a": ["i3"]}, k=4, where={"colour": "red"}, exclude=["i6"])
    names = set(_column(found, "item_id"))
    assert len(names) == 4 and names <= {f"i{i}" for i in range(0, ITEMS, 3)} - {"i0", "i3", "i6"}
    for wrong, words in (
        ({"items": "i3"}, "give a list"),
        ({"items": ["nothing"]}, "is known to the model"),
        ({"where": {"color": "red"}}, "no column 'color'; its columns are 'colour'"),
        ({"where": {"colour": "purple"}}, "no item has colour = 'purple'"),
        ({"where": {"colour": {"min": 3}}}, "holds no numbers"),
        ({"where": {"price": {"least": 3}}}, "give min, max or both"),
        ({"where": {"colour": []}}, "names no value"),
        ({"max_per": {"colour": 0}}, "1 or more"),
        ({"max_per": {"colour": True}}, "1 or more"),
    ):
        with pytest.raises(DpformerError, match=words):
            rec.recommend({"a": ["i3"]}, **wrong)


def test_the_command_line_takes_rules(run: Path, tmp_path: Path) -> None:
    line = ["recommend", run, "--history", "i3", "-k", "5", "--json"]
    rules = ["--item-where", "colour=green|blue", "--item-where", "price>=1", "--item-where", "price<=8"]
    (answer,) = printed(*line, *rules, "--max-per", "colour=2").splitlines()
    names = [entry["item_id"] for entry in json.loads(answer)["recommendations"]]
    assert len(names) == 4 and all(int(name[1:]) % 3 in (1, 2) and 2 <= int(name[1:]) <= 16 for name in names)
    (tmp_path / "ids").write_text("i7\ni8\n\n")
    (answer,) = printed(*line, "--items", f"@{tmp_path / 'ids'}", "--exclude", "i8").splitlines()
    assert [entry["item_id"] for entry in json.loads(answer)["recommendations"]] == ["i7"]
    (tmp_path / "h.jsonl").write_text('{"user_id": "a", "history": ["i3"]}\n')
    out = tmp_path / "out.jsonl"
    printed("recommend", run, "--histories", tmp_path / "h.jsonl", "--out", out, "--items", "i7,i9")
    assert {json.loads(text)["item_id"] for text in out.read_text().splitlines()} == {"i7", "i9"}
    assert "write column=value" in refused(*line, "--item-where", "colour")
    assert "names colour twice" in refused(*line, "--item-where", "colour=red", "--item-where", "colour=blue")
    assert "not column=number" in refused(*line, "--max-per", "colour=two")
    assert "cannot be read" in refused(*line, "--items", "@/nothing/here")


def test_a_model_alone_has_no_columns(run: Path) -> None:
    alone = run / "model.safetensors"
    assert "need the catalogue" in refused("recommend", alone, "--history", "i3", "--max-per", "colour=2")
    book = rule_book(load_release(alone), alone)
    assert book.bind(Rules(exclude=["i3"])).forbidden is not None


def test_a_strangers_folder_is_not_followed(run: Path, tmp_path: Path) -> None:
    """Its catalogue could be any file of ours; see `runs.trust`."""
    from tests.tiny_runs import copied

    other = copied(run, tmp_path)
    (other / "config.toml").write_text((other / "config.toml").read_text().replace("items.csv", "other.csv"))
    with pytest.raises(DpformerError, match="need the catalogue"):
        rule_book(load_release(other / "model.safetensors"), other).bind(Rules(where={"colour": "red"}))


def test_the_service_takes_rules(run: Path) -> None:
    pytest.importorskip("uvicorn")
    from tests.serving.server import serving

    with serving(Served.open(run)) as server:
        asked = {"history": ["i3"], "k": 6, "where": {"colour": ["red", "blue"], "price": {"max": 9}}}
        answer = server.post("/recommend", **asked, max_per={"colour": 2}, exclude=["i9"])
        names = [entry["item_id"] for entry in answer["recommendations"]]
        assert len(names) == 4 and "i9" not in names
        assert sorted(int(name[1:]) % 3 for name in names) == [0, 0, 2, 2]
        only = server.post("/recommend", history=[], items=["i5"], why=True)["recommendations"]
        assert [entry["item_id"] for entry in only] == ["i5"]
        for wrong in ({"where": {"color": "red"}}, {"items": ["x"]}, {"where": {"price": {"least": 1}}}):
            assert server.ask("POST", "/recommend", wrong).status == 422
        assert server.ask("POST", "/recommend", {"max_per": {"colour": 0}}).status == 422


def test_conditions_are_remembered(run: Path) -> None:
    release = load_release(run / "model.safetensors")
    reads = []

    def columns() -> CatalogColumns:
        reads.append(1)
        return CatalogColumns({})

    book = RuleBook(release, columns)
    for _ in range(2):
        with pytest.raises(DpformerError, match="no column"):
            book.bind(Rules(where={"colour": "red"}))
    assert len(reads) == 1
    ranker = Ranker(release)
    assert ranker.top(np.array([], np.int64), np.array([0, 0]), 3).items.shape == (1, 3)


def test_values_of_typed_files_and_of_text_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("item_id,price,stock,tags\n1,5,true,a|b\n2,5.5,false,\n")
    (tmp_path / "a.jsonl").write_text(
        '{"item_id": 1, "price": 5.0, "stock": true, "tags": ["a", "b"]}\n'
        '{"item_id": 2, "price": 5.5, "stock": false, "tags": []}\n'
    )
    for name in ("a.csv", "a.jsonl"):
        columns = read_columns(tmp_path / name, ["2", "1", "3"])
        assert columns["price"].having(["5"]).tolist() == [False, True, False]
        assert columns["price"].between(5.1, 9).tolist() == [True, False, False]
        assert columns["stock"].having(["true"]).tolist() == [False, True, False]
        assert columns["tags"].having(["b"]).tolist() == [False, True, False]


def _column(frame: Any, name: str) -> list[Any]:
    column = frame[name]
    return list(column.to_list() if hasattr(column, "to_list") else column)
