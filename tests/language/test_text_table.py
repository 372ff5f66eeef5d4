"""Texts from tables: the same units as from JSON lines, from files, a database, a Delta table and data frames."""

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

import dpformer as dp
from dpformer.data import Reading
from dpformer.data.text import TextDataset, read_text
from dpformer.data.tokens import Tokens
from dpformer.errors import DpformerError
from tests.data.sources.servers import postgresql  # noqa: F401
from tests.tiny_runs import printed, refused

ROWS = [{"author": f"a{n % 30}", "text": f"text {n} of {n % 30}", "at": 1000 - n} for n in range(120)]
TINY = {"dim": 8, "blocks": 1, "max_length": 16, "epochs": 1, "batch_size": 8, "threads": 1}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def parquet(lines: Path) -> Path:
    path = lines.with_suffix(".parquet")
    duckdb.execute(f"COPY (SELECT * FROM read_json('{lines}')) TO '{path}' (FORMAT parquet)")
    return path


def dataset(path: object, unit: Any = "author", **options: Any) -> TextDataset:
    return read_text(str(path), unit=unit, tokens=Tokens.of_characters("ascii"), max_length=1000, **options)


def units(found: TextDataset) -> list[str]:
    """The texts of all units, in any order."""
    tokens = [found.items[start:stop] for start, stop in zip(found.offsets, found.offsets[1:], strict=False)]
    assert found.tokens is not None
    return sorted(found.tokens.decode(each.tolist()) for each in (*tokens, *found.held_out_text) if len(each))


def test_a_table_is_read_like_json_lines(lines: Path, parquet: Path, tmp_path: Path) -> None:
    expected = dataset(lines)
    assert dataset(parquet).hash == expected.hash
    assert dataset(parquet, "document").num_users == dataset(lines, "document").num_users == len(ROWS)
    database = tmp_path / "texts.duckdb"
    with duckdb.connect(str(database)) as connection:
        connection.execute(f"CREATE TABLE texts AS SELECT author, text AS body FROM read_parquet('{parquet}')")
        connection.execute("CREATE TABLE other AS SELECT 1 AS n")
    found = dataset(database, text_column="body", id_column="author", reading=Reading(table="texts"))
    assert found.hash == expected.hash
    query = Reading(query="SELECT * FROM log WHERE author <> 'a7'")
    assert units(dataset(parquet, reading=query)) == [text for text in units(expected) if " of 7\n" not in text]


def test_a_column_of_times_orders_the_texts_of_an_author(parquet: Path) -> None:
    backwards = units(dataset(parquet, time_column="at"))
    assert [sorted(text.split("\n")) for text in backwards] != backwards
    for text in backwards:
        numbers = [int(line.split()[1]) for line in text.split("\n") if line]
        assert numbers == sorted(numbers, reverse=True)


def test_a_database_and_a_delta_table(
    lines: Path,
    parquet: Path,
    tmp_path: Path,
    postgresql: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hush")
    dbapi = pytest.importorskip("adbc_driver_postgresql.dbapi", reason="adbc-driver-postgresql is not installed")
    rows = duckdb.sql(f"SELECT * FROM read_parquet('{parquet}')").to_arrow_table()
    with dbapi.connect(postgresql) as connection, connection.cursor() as cursor:
        cursor.adbc_ingest("texts", rows, mode="replace")
        connection.commit()
    found = dataset(postgresql, time_column="at", reading=Reading(table="texts"))
    assert units(found) == units(dataset(parquet, time_column="at"))
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'dpformer[delta]'")
    deltalake.write_deltalake(str(tmp_path / "delta"), rows)
    deltalake.DeltaTable(str(tmp_path / "delta")).delete("author = 'a7'")
    found = dataset(tmp_path / "delta", time_column="at")
    assert found.description["snapshot"] == "1"
    assert units(found) == [text for text in units(dataset(parquet, time_column="at")) if " of 7\n" not in text]


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_data_frame_trains(library: str, tmp_path: Path) -> None:
    made = pytest.importorskip(library, reason=f"{library} is not installed")
    columns = {name: [row[name] for row in ROWS] for name in ("author", "text", "at")}
    frame = {"pandas": lambda: made.DataFrame(columns), "polars": lambda: made.DataFrame(columns)}.get(
        library, lambda: made.table(columns)
    )()
    model = dp.LanguageModel(unit="author", timestamp_column="at", model="transformer", **TINY)
    model.fit(frame, out=tmp_path / "run")
    assert "N = 30" in (tmp_path / "run" / "privacy.json").read_text()


def test_one_command_trains_on_a_table(parquet: Path, tmp_path: Path) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    run = tmp_path / "run"
    printed("train", parquet, "--task", "lm", "--unit", "author", "--model", "transformer", "--out", run, *options)
    assert "data and split are the same" in printed("verify", run)


def test_refusals(lines: Path, parquet: Path, tmp_path: Path) -> None:
    for given, sentence in {
        (parquet, "--unit", "line"): "give --unit author or document",
        (parquet, "--unit", "author", "--text-column", "body"): "no column 'body'",
        (parquet, "--unit", "author", "--text-column", "at"): "is of type BIGINT, not text",
        (parquet, "--unit", "author", "--user-column", "buyer"): "no column 'buyer'",
        (lines, "--unit", "author", "--query", "SELECT 1"): "--query applies to tables",
        (lines, "--unit", "author", "--timestamp-column", "at"): "--timestamp-column applies to tables",
        (lines, "--unit", "author", "--order", "file"): "order applies to logs of items",
    }.items():
        said = refused("train", *given, "--task", "lm", "--out", tmp_path / "run")
        assert sentence in said, (given, said)
    assert not (tmp_path / "run").exists()
    duckdb.execute(f"COPY (SELECT 'a' AS author, NULL::VARCHAR AS text) TO '{tmp_path}/none.parquet' (FORMAT parquet)")
    with pytest.raises(DpformerError, match="row 1 has no text: leave such rows out with --query"):
        dataset(tmp_path / "none.parquet")
