"""The law of reading: adding one hostile user's rows leaves every other user's history as it is, or refuses the file.

The same in every format, with bad rows refused and with bad rows skipped. `fuzz` searches with the same function.
"""

import json
import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import duckdb
import numpy as np
import pytest
from fuzz.law import FORMATS, hostile_rows_change_nobody, log_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpformer.data import Reading, prepare, read
from dpformer.data.interactions import Codes
from dpformer.data.sources.frames import from_frame
from dpformer.errors import DpformerError

rows = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from(
            [b"troll", b"i1", b"1", b",", b"::", b" ", b"\t", b'"', b"\r", b"\n", b"\0", b"\xff", b"2024-01-01", b"1.5",
             b"nan", b"user_id", b"item_id", b"timestamp", b"{", b"}", b":", b'"timestamp"', b"u1", b"9" * 40]
        ),
        max_size=14,
    ).map(b"".join),
)  # fmt: skip


@settings(max_examples=8)
@given(hostile=rows, first=st.booleans(), skip=st.booleans())
@pytest.mark.parametrize("name", FORMATS)
@example(hostile=b"troll,i1,1\xff", first=True, skip=True)
@example(hostile=b'troll,"i1,1', first=True, skip=True)
@example(hostile=b'{"user_id": "troll", "item_id": "i1", "time": 1}', first=True, skip=True)
@example(hostile=b"\xff\xfe", first=True, skip=True)
def test_one_users_rows_change_nobody_else(tmp_path: Path, name: str, hostile: bytes, first: bool, skip: bool) -> None:
    hostile_rows_change_nobody(tmp_path, name, hostile, first=first, skip=skip)


@pytest.mark.parametrize("name", FORMATS)
def test_the_log_itself_is_read(tmp_path: Path, name: str) -> None:
    for skip in (False, True):
        hostile_rows_change_nobody(tmp_path, name, b"", first=True, skip=skip)


def others(path: Path, **declared: object) -> dict[str, list[str]]:
    found = read(path, reading=Reading(**declared)).named()  # type: ignore[arg-type]
    return {user: items for user, items in found.items() if user != "troll"}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_byte_that_is_not_utf_8(tmp_path: Path) -> None:
    """It turned the whole file into Latin-1: other users' ids and items became others."""
    whole = "user_id,item_id,ts\n" + "".join(f"zoë{user},ítem{step},{step}\n" for user in range(9) for step in range(5))
    path = written(tmp_path / "log.csv", whole.encode() + b"troll,\xff,1\n")
    with pytest.raises(DpformerError, match="is not UTF-8"):
        read(path)
    assert others(path, skip_bad_rows=True) == others(written(tmp_path / "clean.csv", whole.encode()))


def test_a_first_object_without_a_time(tmp_path: Path) -> None:
    """It set the columns of the file: everybody's rows were taken in file order."""
    whole = log_of("jsonl")
    hostile = b'{"user_id": "troll", "item_id": "i1"}\n'
    with pytest.raises(DpformerError, match="row 1: the timestamp is missing"):
        read(written(tmp_path / "log.jsonl", hostile + whole))
    clean = others(written(tmp_path / "clean.jsonl", whole))
    assert others(tmp_path / "log.jsonl", skip_bad_rows=True) == clean
    renamed = json.dumps({"user_id": "troll", "item_id": "i1", "time": 1}).encode() + b"\n"
    assert others(written(tmp_path / "log.jsonl", renamed + whole)) == clean


def test_a_fraction_among_nanoseconds(tmp_path: Path) -> None:
    """It turned all times into floats, in which a nanosecond is lost."""
    base = 1_700_000_000_000_000_000
    whole = "user,item,ts\n" + "".join(f"u{user},i{step},{base - step}\n" for user in range(5) for step in range(4))
    clean = others(written(tmp_path / "clean.csv", whole.encode()))
    assert clean["u1"] == ["i3", "i2", "i1", "i0"]
    assert others(written(tmp_path / "log.csv", whole.encode() + b"troll,i1,1.5\n")) == clean


def test_rows_inside_a_quoted_field_are_not_rows(tmp_path: Path) -> None:
    """A title with line breaks may spell another user's rows: what a reader of lines would take for them."""
    hostile = b'user,item,title,ts\ntroll,i1,"x,5\nvictim,i9,t,7\ny",3\nvictim,i1,t,1\n'
    for skip in (False, True):
        with pytest.raises(DpformerError, match="unclosed quote"):
            read(written(tmp_path / "log.csv", hostile), reading=Reading(skip_bad_rows=skip))


def test_line_ends_are_not_taken_from_the_first_row(tmp_path: Path) -> None:
    whole = log_of("csv")
    header, _, rest = whole.partition(b"\n")
    clean = others(written(tmp_path / "clean.csv", whole))
    assert others(written(tmp_path / "log.csv", header + b"\r\ntroll,i1,1\r\n" + rest)) == clean
    assert others(written(tmp_path / "log.csv", header + b"\ntroll,i1,1\rtroll,i2,2\n" + rest)) == clean


def test_the_number_of_users_depends_on_nobody_elses_rows(tmp_path: Path) -> None:
    """A filter on how often items occur let one user change N from 30 to 71: there is none."""
    from dpformer.runs.config import Config

    with pytest.raises(DpformerError, match="unknown key 'min_item_actions'"):
        Config.make(min_item_actions=5)


def test_types_in_a_parquet_file_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    query = "SELECT 'u' || (range % 3) AS user_id, range AS item_id, CAST(range AS VARCHAR) AS ts FROM range(30)"
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({query}) TO '{path}'")
        clean = others(path)
        connection.execute(
            f"COPY (SELECT 'troll' AS user_id, 1 AS item_id, 'noon' AS ts UNION ALL {query}) TO '{path}'"
        )
    with pytest.raises(DpformerError, match="row 1: the timestamp 'noon' is not a time"):
        read(path)
    assert others(path, skip_bad_rows=True) == clean
    assert prepare(path, reading=Reading(skip_bad_rows=True)).description["skipped"] == {"no time": 1}


def test_one_users_true_is_not_anothers_one() -> None:
    """In a dict True equals 1: the first of them named the item of both."""
    frame = {"user_id": ["troll", "a", "a", "a"], "item_id": [True, 1, 2, 1.0], "timestamp": [0, 1, 2, 3]}
    assert from_frame(frame).histories().named() == {"troll": ["True"], "a": ["1", "2", "1"]}
    mixed = {**frame, "item_id": [Decimal("1.0"), 1, 2, 1.0]}
    assert from_frame(mixed).histories().named()["a"] == ["1", "2", "1"]


def test_ids_that_collide_cost_what_others_cost(tmp_path: Path) -> None:
    """Whole numbers that are 0 modulo 2⁶¹ − 1 have one hash in Python: a dict of 100,000 of them takes an hour."""
    ids = [number * (2**61 - 1) for number in range(100_000)]
    codes = Codes()
    assert [codes[number] for number in ids] == list(range(len(ids)))
    rows = "".join(f'{{"user_id": 1, "item_id": {number}, "timestamp": 1}}\n' for number in ids[:20_000])
    assert len(read(written(tmp_path / "log.jsonl", rows.encode())).item_ids) == 20_000


@pytest.mark.parametrize("sql", ["SELECT 1; COPY (SELECT * FROM log) TO '{leak}'", "SELECT * FROM read_csv('{other}')"])
def test_sql_reads_its_log_alone_and_writes_nothing(tmp_path: Path, sql: str) -> None:
    """A query is part of config.toml, which may be untrusted."""
    path, leak = tmp_path / "log.parquet", tmp_path / "leak.csv"
    other = written(tmp_path / "other.csv", b"user_id,item_id,timestamp\nroot,secret,1\n")
    with duckdb.connect() as connection:
        connection.execute(f"COPY (SELECT 'u' AS user_id, 1 AS item_id, 1 AS timestamp) TO '{path}'")
    with pytest.raises(DpformerError, match="Permission Error"):
        read(path, reading=Reading(query=sql.format(leak=leak, other=other)))
    assert not leak.exists()
    assert read(path, reading=Reading(query="SELECT * FROM log")).named() == {"u": ["1"]}


def test_a_view_of_a_strangers_database_reads_no_other_file(tmp_path: Path) -> None:
    other = written(tmp_path / "other.csv", b"user_id,item_id,timestamp\nroot,secret,1\n")
    with duckdb.connect(str(tmp_path / "log.duckdb")) as connection:
        connection.execute("CREATE TABLE log AS SELECT 'u' AS user_id, 1 AS item_id, 1 AS timestamp")
        connection.execute(f"CREATE VIEW trap AS SELECT * FROM read_csv('{other}')")
    assert read(tmp_path / "log.duckdb", reading=Reading(table="log")).named() == {"u": ["1"]}
    with pytest.raises(DpformerError, match="Permission Error"):
        read(tmp_path / "log.duckdb", reading=Reading(table="trap"))


def test_one_row_in_another_format_of_times(tmp_path: Path) -> None:
    """A date among numbers ended the run, --skip-bad-rows or not. It concerns its user alone."""
    whole = log_of("csv")
    clean = others(written(tmp_path / "clean.csv", whole))
    path = written(tmp_path / "log.csv", whole + b"troll,i1,2024-01-01\ntroll,i2,5\ntroll,i3,6\n")
    with pytest.raises(DpformerError, match="times that are dates"):
        read(path)
    found = read(path, reading=Reading(skip_bad_rows=True))
    assert found.facts["skipped"] == {"no time": 1} and found.named()["troll"] == ["i2", "i3"]
    assert others(path, skip_bad_rows=True) == clean
    dated = written(tmp_path / "dated.csv", whole + b"troll,i1,2024-01-02\ntroll,i2,2024-01-01\n")
    assert read(dated, reading=Reading(skip_bad_rows=True)).named()["troll"] == ["i2", "i1"]


@pytest.mark.parametrize("row", [b'troll,"i1,1', b'"troll,i1,1', b'"', b'troll,"i1"x,1', b'troll,i1,"x'])
@pytest.mark.parametrize("times", [1, 3])
def test_a_quote_that_does_not_close_is_skipped_and_counted(tmp_path: Path, row: bytes, times: int) -> None:
    whole = log_of("csv")
    path = written(tmp_path / "log.csv", whole + (row + b"\n") * times + b"late,i1,9\n")
    with pytest.raises(DpformerError, match=r"an unclosed quote.*or skip such rows"):
        read(path)
    found = read(path, reading=Reading(skip_bad_rows=True))
    assert found.facts["skipped"] == {"unclosed quote": times}
    named = found.named()
    assert named.pop("late") == ["i1"] and named == others(written(tmp_path / "clean.csv", whole))


def test_lines_between_two_open_quotes_may_be_a_field(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", log_of("csv") + b'troll,i1,"\nu1,i1,1\ntroll,i2,"\n')
    for skip in (False, True):
        with pytest.raises(DpformerError, match="unclosed quote"):
            read(path, reading=Reading(skip_bad_rows=skip))


@pytest.mark.parametrize("key", ["user_id", "item_id", "timestamp"])
def test_a_json_row_with_a_key_twice_goes_to_nobody(tmp_path: Path, key: str) -> None:
    """It went to the first user."""
    whole = log_of("jsonl")
    row = {"user_id": "u1", "item_id": "i1", "timestamp": 1}
    twice = json.dumps(row)[:-1] + f', "{key}": "troll"}}\n'
    path = written(tmp_path / "log.jsonl", whole + twice.encode())
    with pytest.raises(DpformerError, match="has a duplicate key"):
        read(path)
    found = read(path, reading=Reading(skip_bad_rows=True))
    assert found.facts["skipped"] == {"duplicate key": 1}
    assert found.named() == read(written(tmp_path / "clean.jsonl", whole)).named()
    escaped = twice.replace(f', "{key}"', f', "{key[:-1]}\\u{ord(key[-1]):04x}"')
    with pytest.raises(DpformerError, match="has a duplicate key"):
        read(written(tmp_path / "log.jsonl", whole + escaped.encode()))


BIG = 2**53 + 1  # 2**53 as a float: two users would collide


def _big_parquet(path: Path, kind: str, number: int) -> Path:
    with duckdb.connect() as connection:
        rows = f"SELECT CAST({number} + r % 2 AS {kind}) AS user_id, r AS item_id, r AS timestamp FROM range(8) t(r)"
        connection.execute(f"COPY ({rows} UNION ALL SELECT 7, r, r FROM range(4) t(r)) TO '{path}' (FORMAT parquet)")
    return path


@pytest.mark.parametrize(("kind", "number"), [("DOUBLE", 2**53), ("FLOAT", 2**24)])
def test_float_ids_that_merge_users_are_refused(tmp_path: Path, kind: str, number: int) -> None:
    path = _big_parquet(tmp_path / "log.parquet", kind, number)
    with pytest.raises(DpformerError, match="has no user_id"):
        read(path)
    assert read(path, reading=Reading(skip_bad_rows=True)).facts["skipped"] == {"no user": 8}
    exact = _big_parquet(tmp_path / "exact.parquet", "BIGINT", number)
    assert set(read(exact).user_ids) == {str(number), str(number + 1), "7"}


def test_float_ids_of_json_and_sqlite(tmp_path: Path) -> None:
    row = '{"user_id": %s, "item_id": 7.0, "timestamp": 1}\n'
    path = written(tmp_path / "log.jsonl", (row % f"{BIG}.0").encode())
    with pytest.raises(DpformerError, match="has no user_id"):
        read(path)
    exact = written(tmp_path / "log.jsonl", "".join(row % name for name in (BIG, f'"{BIG}.0"', "2.5")).encode())
    assert read(exact).named() == {str(BIG): ["7"], f"{BIG}.0": ["7"], "2.5": ["7"]}
    base = tmp_path / "log.db"
    with closing(sqlite3.connect(base)) as connection, connection:
        connection.execute("CREATE TABLE log (user_id, item_id, timestamp)")
        rows = [(1e15 + 1, 7.0, 1), (1e15 + 2, 2.5, 2), (BIG, "x", 1)]
        connection.executemany("INSERT INTO log VALUES (?, ?, ?)", rows)
    assert set(read(base).user_ids) == {"1000000000000001", "1000000000000002", str(BIG)}
    with closing(sqlite3.connect(base)) as connection, connection:
        connection.execute("INSERT INTO log VALUES (?, 'x', 1)", [float(BIG)])
    with pytest.raises(DpformerError, match="has no user_id"):
        read(base)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_float_ids_of_frames(kind: type) -> None:
    big = 2.0 ** (53 if kind is np.float64 else 24)
    frame = {"user_id": np.array([big, 7], dtype=kind), "item_id": [1, 2], "timestamp": [1, 2]}
    with pytest.raises(DpformerError, match="stands for several integers"):
        from_frame(frame)
    assert from_frame({**frame, "user_id": np.array([big - 1, 7], dtype=kind)}).user_ids == [str(int(big) - 1), "7"]


@pytest.mark.parametrize("mark", ["_delta_log/00000.json", ".hoodie/hoodie.properties", "metadata/v1.metadata.json"])
def test_files_of_a_table_are_not_a_log(tmp_path: Path, mark: str) -> None:
    """Rows that were deleted from a table are still in its files: 60 users were trained on instead of 50."""
    table = tmp_path / "lake" / "table"
    (table / mark).parent.mkdir(parents=True)
    (table / mark).write_text("{}")
    (table / "data").mkdir()
    with duckdb.connect() as connection:
        row = "SELECT 'u' AS user_id, 1 AS item_id, 1 AS timestamp"
        connection.execute(f"COPY ({row}) TO '{table}/data/part.parquet' (FORMAT parquet)")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "log.parquet").symlink_to(table / "data" / "part.parquet")
    part = table / "data" / "part.parquet"
    for path in (table, table / "data", part, tmp_path / "lake" / "*" / "data" / "*", tmp_path / "links"):
        refusal = "rows that were deleted|cannot be read as a Delta table|which of its states is the current one"
        with pytest.raises(DpformerError, match=refusal):
            read(path)
