"""A new format is one file: this one adds logfmt (`user_id=7 item_id=3 timestamp=1`) from outside."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpformer.data import Reading, read
from dpformer.data.readers import formats
from dpformer.data.readers.formats import Format, Given, register
from dpformer.data.readers.jsonl import json_lines
from dpformer.data.readers.relation import Relation
from dpformer.errors import DpformerError
from tests.tiny_runs import printed, refused


def read_logfmt(given: Given) -> Relation:
    """Every line as a JSON object, which is read as JSON lines are."""
    given.folder.mkdir(parents=True, exist_ok=True)
    made = []
    for number, file in enumerate(given.files):
        pairs = [dict(pair.split("=", 1) for pair in line.split()) for line in file.read_text().splitlines()]
        made.append(given.folder / f"{number}.jsonl")
        made[-1].write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return json_lines(made, given.wanted)


@pytest.fixture
def logfmt() -> Iterator[Format]:
    added = Format("logfmt", "logfmt", (".logfmt",), read_logfmt)
    register(added)
    yield added
    del formats._registered["logfmt"]


def test_it_is_read_by_its_name_and_by_option(logfmt: Format, tmp_path: Path) -> None:
    rows = "".join(f"user_id=u{user} item_id=i{step} timestamp={step}\n" for user in range(3) for step in range(4))
    by_name, other = tmp_path / "log.logfmt", tmp_path / "log.csv"
    for path in (by_name, other):
        path.write_text(rows)
    found = read(by_name)
    assert found.facts["format"] == "logfmt" and found.named()["u1"] == ["i0", "i1", "i2", "i3"]
    assert json.loads(printed("data", other, "--format", "logfmt", "--json"))["users"] == 3
    assert "must be one of csv" in refused("data", other, "--format", "xls")
    assert "logfmt" in refused("data", other, "--format", "xls")


def test_a_name_or_suffix_belongs_to_one_format(logfmt: Format) -> None:
    for name, suffix in (("logfmt", ".x"), ("other", ".csv")):
        with pytest.raises(ValueError, match="has the name or a suffix of"):
            register(Format(name, name, (suffix,), read_logfmt))
    suffixes = [suffix for known in formats.formats().values() for suffix in known.suffixes]
    assert len(suffixes) == len(set(suffixes))


def test_without_it_the_name_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.logfmt"
    path.write_text("user_id=1 item_id=2 timestamp=3\n")
    with pytest.raises(DpformerError, match=r"give --format, one of csv, tsv, inter, movielens, lines, duckdb, jsonl"):
        read(path)
    with pytest.raises(DpformerError, match="format is 'logfmt'"):
        Reading(format="logfmt")
