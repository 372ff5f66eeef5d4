"""N is published, and δ follows from it: neither may depend on what a user did."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpformer.data import Filters, Reading, prepare, read_catalog
from dpformer.errors import DpformerError
from tests.tiny_runs import printed, refused

USERS = 944


def write_log(path: Path, *, last: str) -> Path:
    """Ratings of 944 users; the last one met another item, gave low ratings, or did little."""
    rows = [f"u{user},i{(user + step) % 40},{step},5" for user in range(USERS - 1) for step in range(6)]
    rows += {
        "usual": [f"last,i{step},{step},5" for step in range(6)],
        "unknown": [f"last,other{step},{step},5" for step in range(6)],
        "low": [f"last,i{step},{step},1" for step in range(6)],
        "few": ["last,i1,1,5"],
    }[last]
    path.write_text("user_id,item_id,timestamp,rating\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("last", "options"),
    [
        ("unknown", {"drop_unknown_items": True}),
        ("low", {"filters": Filters(min_rating=3)}),
        ("few", {"filters": Filters(min_user_actions=5)}),
    ],
)
def test_a_user_who_is_filtered_away_counts(tmp_path: Path, last: str, options: dict[str, Any]) -> None:
    """It was 944 or 943, in every statement, which revealed the last user to anyone who knew the others."""
    catalog = tmp_path / "items.csv"
    catalog.write_text("item_id\n" + "".join(f"i{item}\n" for item in range(40)))
    found = {}
    for kind in ("usual", last):
        log = write_log(tmp_path / f"{kind}.csv", last=kind)
        found[kind] = prepare(log, vocabulary=read_catalog(catalog), **options)
    assert [found[kind].num_users for kind in ("usual", last)] == [USERS, USERS]
    assert found[last].lengths[-1] == 0 and found[last].user_ids[-1] == "last"
    assert found[last].description["users"] == USERS


def test_statements_and_deltas_of_the_two_are_equal(tmp_path: Path) -> None:
    facts = []
    for kind in ("usual", "low"):
        log = write_log(tmp_path / f"{kind}.csv", last=kind)
        out = tmp_path / kind
        printed("train", log, "--out", out, "--min-rating", 3, "--model", "counts", "--epsilon", 8)
        facts.append(json.loads((out / "privacy.json").read_text()))
    assert facts[0]["users"] == facts[1]["users"] == USERS
    assert facts[0]["delta"] == facts[1]["delta"] == 1 / (10 * USERS)
    assert "N = 944, counts all users in the data, before any filter" in " ".join(facts[0]["data"])


def test_a_declared_number_is_taken_as_it_is(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", last="low")
    out = tmp_path / "run"
    printed("train", log, "--out", out, "--users", 1000, "--min-rating", 3, "--model", "counts", "--epsilon", 8)
    facts = json.loads((out / "privacy.json").read_text())
    assert (facts["users"], facts["delta"]) == (1000, 1e-4)
    assert "N = 1,000, was declared before the data was read" in " ".join(facts["data"])
    assert "users" in printed("verify", out, "--data", log), "the data is checked with the declared number"
    assert "declare at least as many" in refused("train", log, "--out", tmp_path / "x", "--users", 943)
    assert not (tmp_path / "x").exists()
    bigger = write_log(tmp_path / "bigger.csv", last="usual")
    bigger.write_text(bigger.read_text() + "".join(f"new{n},i1,{t},5\n" for n in range(90) for t in range(3)))
    assert "users" in printed("evaluate", out, bigger, "--samples", 10), "it is of the run's own log"


def test_a_user_whose_rows_are_all_bad_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = "".join(f"u{user},i{step},{step}\n" for user in range(5) for step in range(4))
    path.write_text(f"user_id,item_id,timestamp\n{rows}late,i1,noon\nlate,i2,\n,i3,1\n")
    dataset = prepare(path, reading=Reading(skip_bad_rows=True))
    assert dataset.num_users == 6 and dataset.lengths.tolist() == [4] * 5 + [0]
    with pytest.raises(DpformerError, match="'noon' is not a time"):
        prepare(path)


def test_networks_train_with_users_who_have_nothing(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", last="low")
    out = tmp_path / "run"
    small = ["--model", "gru", "--dim", 4, "--epochs", 1, "--batch-size", 64, "--assume-items-public"]
    printed("train", log, "--out", out, "--users", 2000, "--min-rating", 3, *small)
    assert json.loads((out / "privacy.json").read_text())["sample_rate"] == 64 / 2000
