"""`dpformer data` from outside: facts, JSON, and one sentence with exit code 2 for bad input."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpformer.cli import app
from tests.commands import command


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    rows = [f"u{user},i{(user + step) % 7},5,{1_600_000_000 + step // 2}" for step in range(5) for user in range(9)]
    path.write_text("\n".join(["user_id,item_id,rating,timestamp", *rows, "short,i0,1,1600000009"]))
    return path


def test_json_holds_the_facts(log: Path) -> None:
    facts = json.loads(CliRunner().invoke(app, ["data", str(log), "--json", "--validation"]).stdout)
    assert (facts["users"], facts["items"], facts["interactions"]) == (10, 7, 46)
    assert facts["split"] == {"rule": "leave-last-out", "validation": True, "test_users": 9, "train_only_users": 1}
    assert facts["lengths"] == {"min": 1, "median": 5.0, "mean": 4.6, "max": 5}
    assert facts["time_range"] == [1_600_000_000, 1_600_000_009] and facts["tied_share"] == round(36 / 46, 4)
    assert "no privacy guarantee" in facts["note"] and any("assumed public" in line for line in facts["statement"])


def test_table_says_what_it_is(log: Path) -> None:
    shown = CliRunner().invoke(app, ["data", str(log), "--min-rating", "2", "--min-user-actions", "2"])
    assert shown.exit_code == 0
    text = " ".join(shown.stdout.split())
    for words in ("min rating 2, min user actions 2", "10 users, 7 items, 46", "2020-09-13", "no privacy guarantee"):
        assert words in text


def test_catalogue(log: Path, tmp_path: Path) -> None:
    catalog = tmp_path / "items.jsonl"
    catalog.write_text("\n".join(json.dumps({"id": f"i{item}", "title": f"Item {item}"}) for item in range(6)))
    refused = command("data", log, "--catalog", catalog)
    assert refused.returncode == 2 and "not in the catalogue" in refused.stderr
    arguments = ["data", str(log), "--catalog", str(catalog), "--drop-unknown-items", "--json"]
    facts = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert facts["items"] == 6 and facts["vocabulary"]["interactions_dropped"] > 0


def test_a_name_is_no_markup(log: Path) -> None:
    path = log.rename(log.with_name("[red]x.csv"))
    shown = CliRunner().invoke(app, ["data", str(path)])
    assert shown.exit_code == 0 and "[red]x.csv (CSV)" in shown.stdout


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    junk = tmp_path / "junk.csv"
    junk.write_bytes(bytes(range(256)))
    for path in (junk, tmp_path / "nothing.csv", tmp_path):
        done = command("data", path)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("dpformer: ") and done.stderr.count("\n") == 1
