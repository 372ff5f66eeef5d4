"""`dpformer recommend`: the users' own ids in and out, alone and in batches."""

import json
from pathlib import Path

import numpy as np
import pytest

from dpformer.runs.model_file import load_release
from tests.tiny_runs import invoke, printed, ranking_of, refused, same_ranking, tiny_run


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory)


def test_a_history_gets_the_best_items_not_in_it(run: Path) -> None:
    line = json.loads(printed("recommend", run, "--history", "i3, i4,i5", "-k", 4, "--json"))
    release = load_release(run / "model.safetensors")
    scores = release.model.scores([[3, 4, 5]])[0].detach().numpy().copy()
    scores[[3, 4, 5]] = -np.inf
    best = np.argsort(-scores)[:4]
    assert line["history"] == ["i3", "i4", "i5"]
    same_ranking(ranking_of(line["recommendations"]), [(f"i{item}", scores[item]) for item in best])
    for entry in line["recommendations"]:
        assert entry["title"] == release.title(int(entry["item_id"][1:]))


def test_a_table_for_people(run: Path) -> None:
    text = printed("recommend", run, "--history", "i3", "-k", 2)
    assert "rank" in text and "title" in text and "Title" in text


def test_titles_can_come_later(run: Path, tmp_path: Path) -> None:
    (tmp_path / "titles.csv").write_text("item_id,title\n" + "".join(f"i{n},New {n}\n" for n in range(10)))
    text = printed("recommend", run, "--history", "", "-k", 20, "--json", "--catalog", tmp_path / "titles.csv")
    titles = {entry["item_id"]: entry["title"] for entry in json.loads(text)["recommendations"]}
    assert titles["i3"] == "New 3" and titles["i12"] == "i12"
    assert "does not exist" in refused("recommend", run, "--history", "i1", "--catalog", tmp_path / "nowhere.csv")


def test_the_model_file_alone_is_enough(run: Path) -> None:
    one, other = (printed("recommend", path, "--history", "i1", "--json") for path in (run, run / "model.safetensors"))
    assert one == other


def test_an_empty_history_gets_what_is_popular(run: Path) -> None:
    line = json.loads(printed("recommend", run, "--history", "", "-k", 20, "--json"))
    assert line["history"] == [] and len(line["recommendations"]) == 20


def test_more_than_there_is(run: Path) -> None:
    history = ",".join(f"i{n}" for n in range(18))
    line = json.loads(printed("recommend", run, "--history", history, "-k", 1000, "--json"))
    assert {entry["item_id"] for entry in line["recommendations"]} == {"i18", "i19"}


FILES = {
    "log.csv": "user_id,item_id,timestamp\nb,i2,2\na,i5,7\nb,i1,1\n",
    "log.jsonl": "".join(
        f'{{"user_id": "{user}", "item_id": "i{item}", "ts": {item}}}\n' for user, item in ("b1", "b2", "a5")
    ),
    "histories.jsonl": '{"user_id": "b", "history": ["i1", "i2"]}\n\n{"user_id": "a", "history": ["i5"]}\n',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_histories(name: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    found = [
        json.loads(line)
        for line in printed("recommend", run, "--histories", tmp_path / name, "--json", "-k", 3).splitlines()
    ]
    assert [line["user_id"] for line in found] == ["b", "a"]
    alone = json.loads(printed("recommend", run, "--history", "i1,i2", "--json", "-k", 3))
    same_ranking(ranking_of(found[0]["recommendations"]), ranking_of(alone["recommendations"]))
    assert printed("recommend", run, "--histories", tmp_path / name, "-k", 3).count("Title") >= 4


def test_bare_lists_are_numbered_by_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "lists.jsonl").write_text('["i1"]\n[]\n')
    found = [
        json.loads(line)
        for line in printed("recommend", run, "--histories", tmp_path / "lists.jsonl", "--json").splitlines()
    ]
    assert [line["user_id"] for line in found] == ["1", "2"]


def test_unknown_items_of_a_file_are_skipped_and_counted(run: Path, tmp_path: Path) -> None:
    (tmp_path / "lists.jsonl").write_text('["i1", "unknown"]\n["i1"]\n')
    done = invoke("recommend", run, "--histories", tmp_path / "lists.jsonl", "--json")
    assert done.exit_code == 0 and "1 of 3 interactions were ignored" in done.stderr
    assert "does not know 1 item" in refused(
        "recommend", run, "--histories", tmp_path / "lists.jsonl", "--unknown", "error"
    )
    one, other = (json.loads(line)["recommendations"] for line in done.stdout.splitlines())
    same_ranking(ranking_of(one), ranking_of(other))


def test_bad_input_is_one_sentence(run: Path, tmp_path: Path) -> None:
    assert "k is 0; it must be 1 or more" in refused("recommend", run, "--history", "i1", "-k", 0)
    assert "'x', 'y'" in refused("recommend", run, "--history", "i1,x,y", "--unknown", "error")
    assert "'x', 'y'" in invoke("recommend", run, "--history", "i1,x,y").stderr
    assert "knows none of the 2 items" in refused("recommend", run, "--history", "x,y")
    assert "--order needs --histories" in refused("recommend", run, "--history", "i1", "--order", "file")
    assert "give either --history" in refused("recommend", run)
    assert "give either --history" in refused("recommend", run, "--histories", run, "--history", "i1")
    assert "does not exist" in refused("recommend", run, "--histories", tmp_path / "nowhere.csv")
    assert "does not exist" in refused("recommend", tmp_path / "nowhere", "--history", "i1")
    assert "holds no model" in refused("recommend", tmp_path, "--history", "i1")
    bad = tmp_path / "bad.jsonl"
    for content, says in (
        ('{"history": 3}\n', 'line 1 has no list of items under "history"'),
        ('["i1"]\n{"history"\n', "line 2 is not JSON"),
        ('["i1", {"a": 1}]\n', "an invalid item id"),
        ("", "has no rows"),
    ):
        bad.write_text(content)
        assert says in refused("recommend", run, "--histories", bad)
    bad.write_bytes(b"[\xff\xfe]\n")
    assert "is not UTF-8" in refused("recommend", run, "--histories", bad)
    assert "is not a comma-separated list of ids" in refused("recommend", run, "--history", "a\nb")
