"""A split by time: before the cut is training, the first item after it is the test; cold users and items apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Columns, Filters, Vocabulary, from_frame, load, prepare
from dpformer.data.restrict_vocabulary import restrict_to_vocabulary
from dpformer.data.shared_store import Store
from dpformer.data.time_split import COLD, TimeSplitDataset
from dpformer.errors import DpformerError
from dpformer.runs import Config, load_dataset
from tests.tiny_runs import invoke, printed, refused
from tests.training.memo import accountant_remembers  # noqa: F401

ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6), st.integers(0, 9)), min_size=2, max_size=30)


def write(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    path.write_text("\n".join(["user_id,item_id,timestamp", *(f"{u},{i},{t}" for u, i, t in rows)]) + "\n")
    return path


@settings(max_examples=40)  # a file is read in each
@given(ROWS, st.integers(0, 10), st.sets(st.integers(0, 6)))
def test_against_a_naive_twin(tmp_path: Path, rows: list[tuple[str, int, int]], cut: int, gone: set[int]) -> None:
    """With items that the catalogue lacks, which move the cut of nobody."""
    known = [str(item) for item in range(7) if item not in gone] or ["0"]
    path = write(tmp_path / "log.csv", rows)
    expected: dict[str, tuple[list[str], list[str]]] = {user: ([], []) for user, _, _ in rows}
    for user, item, time in sorted(rows, key=lambda row: row[2]):  # stable
        if str(item) in known:
            expected[user][time >= cut].append(str(item))
    try:
        dataset = prepare(
            path, vocabulary=Vocabulary(known, policy="catalog"), drop_unknown_items=True, split_at=str(cut)
        )
    except DpformerError as error:
        lengths = [(len(before), len(before + after)) for before, after in expected.values()]
        useless = sum(n > 0 for _, n in lengths) < 2 or max(n for _, n in lengths) < 2
        assert useless or not any(b for b, _ in lengths) or all(b == n for b, n in lengths), error
        return
    assert isinstance(dataset, TimeSplitDataset)
    ids = dataset.vocabulary.ids
    for number, user in enumerate(dataset.user_ids):
        before, _ = expected[user]
        assert [ids[item] for item in dataset.train(number)] == before
    for split, cold in (("test", False), (COLD, True)):
        users, items = dataset.held_out(split)
        found = {dataset.user_ids[user]: ids[item] for user, item in zip(users, items, strict=True)}
        assert found == {u: after[0] for u, (before, after) in expected.items() if after and (not before) == cold}
        histories = dataset.held_out_histories(users, split)
        assert [[ids[i] for i in h] for h in histories] == [expected[u][0] for u in found]
    counts = np.bincount([ids.index(item) for before, _ in expected.values() for item in before], minlength=len(ids))
    np.testing.assert_array_equal(dataset.item_counts(), counts)


SHOP = [(f"u{n}", (n + t) % 9, t) for n in range(30) for t in range(6)]
LATER = [("u0", 50, 6), ("u1", 4, 7), ("new", 4, 8), ("new", 5, 9)]


def test_it_is_kept_on_disk_and_hashed_with_its_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", SHOP + LATER)
    plain = prepare(path)
    datasets = [prepare(path, split_at=cut, cache=tmp_path / "cache") for cut in ("6", "5", "5.5")]
    assert len({plain.hash, *(dataset.hash for dataset in datasets)}) == 3, "5.5 and 6 cut the same"
    again = prepare(path, split_at="6", cache=tmp_path / "cache")
    assert again.folder is not None and load(again.folder).hash == datasets[0].hash
    store = Store.of(again, again.vocabulary)
    assert store is not None
    np.testing.assert_array_equal(store.open().train(0), again.train(0))
    assert datasets[0].leave_last_out().hash == plain.hash
    few = Vocabulary(["4", "5"], policy="dp")
    assert restrict_to_vocabulary(datasets[0], few).train_lengths.tolist() == [
        sum(item in (4, 5) for u, item, t in SHOP if u == user) for user in datasets[0].user_ids
    ]


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", SHOP)
    for cut, says in (("0", "is before --until 0"), ("9", "comes after --until 9")):
        with pytest.raises(DpformerError, match=says):
            prepare(path, split_at=cut)
    with pytest.raises(DpformerError, match="split_at applies to files"):
        prepare(from_frame({"user": [1], "item": [1], "ts": [1]}, Columns()), split_at="1")
    dates = tmp_path / "dates.csv"
    dates.write_text("user_id,item_id,date\n" + "".join(f"{u},i{n},2024-01-0{n}\n" for u in "ab" for n in range(1, 5)))
    with pytest.raises(DpformerError, match="are dates: give a date"):
        prepare(dates, split_at="5")
    assert prepare(dates, split_at="2024-01-03").description["split"]["test_users"] == 2
    assert prepare(dates, split_at="2024-01-03", filters=Filters(since="2024-01-02")).train_lengths.tolist() == [1, 1]
    for options, says in (
        ((), "give the end of the training period with --until"),
        (("--until", "soon"), "must be a date"),
        (("--until", "5", "--validation"), "holds out no validation items"),
        (("--until", "5", "--order", "file"), "order is file"),
        (("--until", "5", "--task", "lm", "--unit", "line"), "applies to logs of items"),
    ):
        assert says in refused("train", path, "--split", "time", *options, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_run_is_trained_before_and_evaluated_after(tmp_path: Path) -> None:
    rows = SHOP + [(f"late{n}", n % 9, 20 + n) for n in range(5)] + [(f"u{n}", (n + 7) % 9, 30) for n in range(25)]
    path = write(tmp_path / "log.csv", [*rows, ("u27", 99, 31)])
    (tmp_path / "items.csv").write_text("item_id\n" + "".join(f"{n}\n" for n in (*range(9), 99)))
    run = tmp_path / "run"
    split = json.loads(printed("data", path, "--split", "time", "--until", "6", "--json"))["split"]
    sizes = {"test_users": 26, "cold_users": 5, "train_only_users": 4}
    assert split == {"rule": "time", "until": "6", "validation": False, **sizes}
    assert "5 first appear later" in " ".join(printed("data", path, "--split", "time", "--until", "6").split())
    options = ("--split", "time", "--until", 6, "--epsilon", 50, "--private-metrics")
    done = invoke("train", path, "--catalog", tmp_path / "items.csv", "--out", run, *options)
    assert done.exit_code == 0, done.output
    statement = json.loads((run / "privacy.json").read_text())
    assert any(line.startswith("Interactions from 6 onwards are held out") for line in statement["data"])
    assert statement["users"] == 35, "later users count"
    assert "contradicts the statement" in printed("verify", run)
    facts = json.loads(printed("evaluate", run, "--json", "--samples", 10))
    assert facts["users"] == 26 and facts["by_time"]["until"] == "6"
    parts = {row["part"]: row for row in facts["by_time"]["parts"]}
    assert [(name, row["users"]) for name, row in parts.items()] == [
        ("item in training", 25), ("new item", 1), ("new user", 5),
    ]  # fmt: skip
    assert all({"ndcg@10", "hit@10"} <= set(row["model"]) & set(row["popularity"]) for row in parts.values())
    assert parts["item in training"]["model"]["hit@10"] > 0.9
    assert json.loads(printed("evaluate", run, "--json", "--samples", 10)) == facts, "from what was kept"
    assert "new user" in printed("evaluate", run, "--samples", 10)
    lines = printed("recommend", run, "--histories", path, "--json", "-k", 10).splitlines()
    assert len(json.loads(lines[0])["recommendations"]) == 10 - 7, "of all that the user did until today"
    again = load_dataset(Config.make(run / "config.toml"))
    assert isinstance(again, TimeSplitDataset)
