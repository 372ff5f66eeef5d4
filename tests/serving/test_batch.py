"""Recommendations for a file: the answers one by one, in every format; what is unknown is skipped."""

import csv
import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from dpformer.errors import DpformerError
from dpformer.serving.batch import write_recommendations
from dpformer.serving.histories import histories_of
from dpformer.serving.packed import Packed
from dpformer.serving.ranking import Ranker
from tests.serving.test_ranking import ITEMS, made_up
from tests.tiny_runs import printed, ranking_of, refused, same_ranking, tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401

PAIRS: list[tuple[Any, list[Any]]] = [("ann", ["i1", "i2"]), ("bob", []), ('c,"d"', ["new", "i3", "newer", "new"])]


def rows(path: Path) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        return connection.execute(f"SELECT * FROM '{path}'").fetchall()


def test_packing_leaves_out_what_is_unknown() -> None:
    packed = Packed.of(histories_of(PAIRS), made_up())
    assert packed.items.tolist() == [1, 2, 3] and packed.offsets.tolist() == [0, 2, 2, 3]
    assert packed.unknown == 3 and packed.unknown_items == 2 and len(packed) == 3
    assert (
        packed.note
        == "3 of 6 interactions were ignored, because the model does not know their 2 items ('new', 'newer')"
    )


def test_what_is_no_history_is_refused() -> None:
    with pytest.raises(DpformerError, match="an invalid item id"):
        histories_of([("ann", [["nested"]])])
    for text in ("SKU-00001", b"SKU", {"a": 1}):
        with pytest.raises(DpformerError, match="give a list of item ids"):
            histories_of([("ann", text)])
    with pytest.raises(DpformerError, match="not iterable"):
        histories_of([("ann", 7)])


def test_unknown_ids_are_reported_ignored_or_refused() -> None:
    ann, bob, cid = ("ann", ["i1", "x"]), ("bob", ["x", "y", "z", "w"]), ("cid", [])
    release = made_up()
    note = Packed.of(histories_of([ann, bob, cid]), release).note
    assert note.startswith(
        "5 of 6 interactions were ignored, because the model does not know their 4 items ('x', 'y', 'z', …)"
    )
    assert note.endswith("1 user of 3 have no other interactions and receive popular items")
    assert Packed.of(histories_of([ann, bob]), release, "ignore").note == ""
    with pytest.raises(DpformerError, match=r"does not know 1 item .*'x'.* 1 of 2 interactions"):
        Packed.of(histories_of([ann]), release, "error")
    for policy in ("report", "error"):
        with pytest.raises(DpformerError, match=r"knows none of the 4 items .* have ids such as 'i0'"):
            Packed.of(histories_of([bob, cid]), release, policy)
    assert len(Packed.of(histories_of([bob]), release, "ignore").items) == 0
    assert Packed.of(histories_of([cid]), release, "error").note == "", "an empty history is not unknown"
    with pytest.raises(DpformerError, match="must be report, ignore or error"):
        Packed.of(histories_of([ann]), release, "warn")


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv", ".jsonl"])
def test_a_file_holds_the_answers_one_by_one(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranker, out, told = Ranker(made_up()), tmp_path / f"recs{suffix}", []
    monkeypatch.setattr("dpformer.serving.ranking.SCORES_AT_ONCE", 2 * ITEMS)  # two blocks
    write_recommendations(ranker, Packed.of(histories_of(PAIRS), ranker.release), out, k=4, done=told.append)
    assert told == [2, 3]
    expected = []
    for user, history in PAIRS:
        known = np.array([int(name[1:]) for name in history if name[1:].isdigit()], dtype=np.int64)
        top = ranker.top(known, np.array([0, len(known)]), 4)
        expected += [(user, rank + 1, f"i{item}") for rank, item in enumerate(top.items[0].tolist())]
    assert [row[:3] for row in rows(out)] == expected
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_the_command(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tiny_run(tmp_path_factory, model="counts", **dict.fromkeys(("batch_size", "epochs", "dim", "blocks")))
    log = tmp_path / "log.csv"
    log.write_text(
        "user_id,item_id,timestamp\n" + "".join(f"u{u},i{(u + t) % 25},{t}\n" for u in range(50) for t in range(5))
    )
    text = printed("recommend", run, "--histories", log, "--out", tmp_path / "recs.csv", "-k", 3)
    assert "recommendations for 50 users" in text
    with (tmp_path / "recs.csv").open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == 150 and list(found[0]) == ["user_id", "rank", "item_id", "title", "score"]
    one = json.loads(printed("recommend", run, "--history", "i3,i4,i5,i6,i7", "-k", 3, "--json"))
    same_ranking(ranking_of(row for row in found if row["user_id"] == "u3"), ranking_of(one["recommendations"]))
    seen = json.loads(printed("recommend", run, "--history", "i3", "-k", 20, "--json", "--allow-seen"))
    assert len(seen["recommendations"]) == 20
    assert "no known format" in refused("recommend", run, "--histories", log, "--out", tmp_path / "recs.xls")
    assert "--out needs --histories" in refused("recommend", run, "--history", "i3", "--out", tmp_path / "recs.csv")
