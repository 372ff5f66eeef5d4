"""Recommendations for a file: the answers one by one, in every format; what is unknown is skipped."""

import csv
import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from dpformer.errors import DpformerError
from dpformer.serving.batch import Packed, histories_of, write_recommendations
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
    with pytest.raises(DpformerError, match="no item id"):
        histories_of([("ann", [["nested"]])])


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv", ".jsonl"])
def test_a_file_holds_the_answers_one_by_one(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranker, out, told = Ranker(made_up()), tmp_path / f"recs{suffix}", []
    monkeypatch.setattr("dpformer.serving.ranking.SCORES_AT_ONCE", 2 * ITEMS)  # two blocks
    write_recommendations(ranker, histories_of(PAIRS), out, k=4, done=told.append)
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
    assert "--out is for --histories" in refused("recommend", run, "--history", "i3", "--out", tmp_path / "recs.csv")
