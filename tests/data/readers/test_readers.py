"""Readers: one log in every format gives the same histories; bad files give one sentence."""

import bz2
import datetime
import gzip
import io
import json
import lzma
import sqlite3
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Columns, Dataset, Filters, Reading, from_frame, prepare, read, read_catalog
from dpformer.data.interactions import id_text
from dpformer.errors import DpformerError

LOG = [
    ("ann", "x", 3.0, 30),
    ("bob", "7", 5.0, 20),
    ("ann", "z y", 1.5, 10),
    ("cé", "x", 4.0, 10),
    ("bob", "q", 2.0, 20),
]
EXPECTED = {"ann": ["z y", "x"], "bob": ["7", "q"], "cé": ["x"]}
FILE_ORDER = {"ann": ["x", "z y"], "bob": ["7", "q"], "cé": ["x"]}


def histories(path: Path, names: Columns | None = None, **declared: Any) -> dict[str, list[str]]:
    return read(path, names, Reading(**declared)).named()


def lines(separator: str, header: str = "", end: str = "\n") -> str:
    return header + end.join(separator.join(map(str, row)) for row in LOG)


def parquet(path: Path, query: str) -> Path:
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({query}) TO '{path}' (FORMAT parquet)")
    return path


VALUES = ", ".join(f"('{u}', '{i}', {r}, {t})" for u, i, r, t in LOG)
TABLE = f"SELECT * FROM (VALUES {VALUES}) AS log(user_id, item_id, rating, timestamp)"
CSV = lines(",", "user_id,item_id,rating,timestamp\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.csv", CSV),
        ("log.csv", lines(",", "User ID,movieId,rating,timestamp\r\n", "\r\n") + "\r\n\r\n"),
        ("log.csv", lines(";", "user;item;rating;time\n")),
        ("log.csv", lines(",", "user,item,rating,created_at\n")),
        ("log.tsv", lines("\t", "user_id\titem_id\trating\ttimestamp\n") + "\n  \n"),
        ("u.data", lines("\t").replace("z y", "zy")),
        ("log.inter", lines("\t", "user_id:token\titem_id:token\trating:float\ttimestamp:float\n")),
        ("ratings.dat", lines("::")),
        ("log.jsonl", "\n".join(json.dumps({"user_id": u, "item_id": i, "timestamp": t}) for u, i, _, t in LOG)),
        ("log.csv", '"uid","x","item","time"\n' + "".join(f'"{u}","a, ""b""c",{i},{t}\n' for u, i, _, t in LOG)),
        ("log.csv", "user,item,at,date\n" + "".join(f"{u},{i},?,1970-01-01 00:00:{t}Z\n" for u, i, _, t in LOG)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bom", [False, True])
def test_every_format_reads_the_same(tmp_path: Path, name: str, text: str, bom: bool) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8-sig" if bom else "utf-8", newline="")
    found = {user: [item.replace("zy", "z y") for item in items] for user, items in histories(path).items()}
    assert found == EXPECTED


def test_parquet_reads_the_same(tmp_path: Path) -> None:
    assert histories(parquet(tmp_path / "log.parquet", TABLE)) == EXPECTED
    assert histories(parquet(tmp_path / "what[e]ver*", TABLE)) == EXPECTED, "known by its bytes; the name is no glob"


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress), (".zst", None)]
)
def test_packed_files(tmp_path: Path, suffix: str, pack: Any) -> None:
    path = tmp_path / f"log.csv{suffix}"
    if pack is None:
        with duckdb.connect() as connection:
            connection.execute(f"COPY ({TABLE}) TO '{path}' (FORMAT csv, COMPRESSION zstd)")
    else:
        path.write_bytes(pack(CSV.encode()))
    assert histories(path) == EXPECTED


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CSV.encode())))
    assert histories(Path("-"), format="csv") == EXPECTED
    with pytest.raises(DpformerError, match="format of standard input cannot be inferred from its name: give --format"):
        histories(Path("-"))
    for pack, command in ((gzip, "gzip -dc"), (lzma, "xz -dc"), (bz2, "bzip2 -dc")):
        packed = io.BufferedReader(io.BytesIO(pack.compress(CSV.encode())))  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(packed))
        with pytest.raises(DpformerError, match=rf"standard input is packed: unpack it first \(… \| {command}"):
            histories(Path("-"), format="csv")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_other_encodings_are_declared(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(CSV.encode(encoding))
    assert histories(path, encoding=encoding) == EXPECTED
    with pytest.raises(DpformerError, match=r"--encoding|header"):
        histories(path)
    with pytest.raises(DpformerError, match="encoding is 'klingon'"):
        histories(path, encoding="klingon")


def test_folders_and_globs_and_partitions(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "_SUCCESS").write_text("")
    with duckdb.connect() as connection:
        for number in range(100):
            query = f"SELECT 'u' || (range % 7) AS user_id, {number} AS item_id, {100 - number} AS ts FROM range(9)"
            connection.execute(f"COPY ({query}) TO '{folder / f'part-{number:03}.parquet'}' (FORMAT parquet)")
    assert prepare(folder).num_interactions == 900
    assert len(read(str(folder / "part-00*.parquet")).codes) == 90
    assert read(folder).named()["u6"][:2] == ["99", "98"]
    for day in (1, 2):
        (tmp_path / "days" / f"day={day}").mkdir(parents=True)
        parquet(tmp_path / "days" / f"day={day}" / "a.parquet", f"SELECT 1 AS user_id, {day} AS item_id")
    assert histories(tmp_path / "days", Columns(timestamp="day")) == {"1": ["1", "2"]}
    (folder / "more.csv").write_text("user_id,item_id,ts\na,b,1\n")
    with pytest.raises(DpformerError, match="several formats"):
        read(folder)
    assert read(folder / "*.csv").named() == {"a": ["b"]}


def test_databases_and_queries(tmp_path: Path) -> None:
    with duckdb.connect(tmp_path / "events.duckdb") as connection:
        connection.execute(f"CREATE TABLE events AS {TABLE}; CREATE TABLE other AS SELECT 1 AS x")
    assert histories(tmp_path / "events.duckdb", table="events") == EXPECTED
    query = "SELECT user_id, item_id, timestamp FROM events WHERE rating > 2.5"
    assert histories(tmp_path / "events.duckdb", query=query) == {"ann": ["x"], "bob": ["7"], "cé": ["x"]}
    with pytest.raises(DpformerError, match="has the tables events, other: choose one with --table"):
        read(tmp_path / "events.duckdb")
    log = parquet(tmp_path / "log.parquet", TABLE)
    assert histories(log, query="SELECT * FROM log WHERE rating > 4.5") == {"bob": ["7"]}
    with sqlite3.connect(tmp_path / "events.sqlite") as connection:
        connection.execute("CREATE TABLE events (user_id, item_id, rating, timestamp)")
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", LOG)
    assert histories(tmp_path / "events.sqlite") == EXPECTED
    with pytest.raises(DpformerError, match="no table 'nothing'"):
        read(tmp_path / "events.sqlite", reading=Reading(table="nothing"))


def test_parquet_of_numbers_and_instants(tmp_path: Path) -> None:
    instant = "TIMESTAMP '1970-01-01 00:10:00' - INTERVAL (range) MINUTE"
    query = f"SELECT range % 3 AS uid, range::DECIMAL(9,1) AS sku, {instant} AS at FROM range(6)"
    log = read(parquet(tmp_path / "log.parquet", query), Columns(item="sku", timestamp="at"))
    assert log.named() == {"0": ["3.0", "0.0"], "1": ["4.0", "1.0"], "2": ["5.0", "2.0"]}
    assert log.facts["time_range"] == [300.0, 600.0] and log.facts["time_column"] == "at"


def test_parquet_keeps_file_order(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    with duckdb.connect() as connection:
        rows = "SELECT range % 7 AS user_id, range::DOUBLE AS item_id FROM range(60000)"
        connection.execute(f"COPY ({rows}) TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE 2048)")
    found = histories(path, order="file")
    assert all(found[str(user)] == [str(number) for number in range(user, 60000, 7)] for user in range(7))


def test_lines_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("1 10\n1   11\n\n2\t10\n")
    assert histories(path) == {"1": ["10", "11"], "2": ["10"]}
    path.write_text("1 10 5 100\n1 11 3 99\n2 10 4 7")
    assert histories(path) == {"1": ["11", "10"], "2": ["10"]}
    assert read(path, filters=Filters(min_rating=4)).named() == {"1": ["10"], "2": ["10"]}
    path.write_text("1 10 100\n1 11 99\n2 10 7")
    assert histories(path) == {"1": ["11", "10"], "2": ["10"]}
    path.write_text("1 10 11 12 10\n2 10\n1 9\n")
    with pytest.raises(DpformerError, match="--columns user,items for lines with one user"):
        read(path)
    assert histories(path, columns="user,items") == {"1": ["10", "11", "12", "10", "9"], "2": ["10"]}
    path = tmp_path / "triples.csv"
    path.write_text("1,10,100\n1,11,99\n")
    with pytest.raises(DpformerError, match="supply a header: --columns user,item,timestamp"):
        read(path)
    assert histories(path, columns="user,item,time") == {"1": ["11", "10"]}
    path = tmp_path / "headed.txt"
    path.write_text("user_id\titem_id\n1\t10\n")
    with pytest.raises(DpformerError, match="seems to have a header"):
        read(path)
    assert histories(path, format="tsv", order="file") == {"1": ["10"]}


def test_numbers_and_text_are_one_id(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"user": 7, "item": " a"}\n{"user": "7", "item": "a "}\n{"user": "07", "item": "a"}\n')
    log = read(path, reading=Reading(order="file"))
    assert list(log.user_ids) == ["7", "07"] and list(log.item_ids) == ["a"]


def test_ids_of_any_type(tmp_path: Path) -> None:
    query = "SELECT uuid() AS user_id, (range / 2)::DOUBLE AS item_id, range AS ts FROM range(3)"
    found = read(parquet(tmp_path / "log.parquet", query))
    assert list(found.item_ids) == ["0", "0.5", "1"] and all(len(user) == 36 for user in found.user_ids)


def test_columns_by_option(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("用户,sku,at\na,1,5\nb,2,6\n", encoding="utf-8")
    assert histories(path, Columns("用户", "sku", "at")) == {"a": ["1"], "b": ["2"]}
    path.write_text("5,a,1\n6,b,2\n")
    assert histories(path, columns="time,user,item") == {"a": ["1"], "b": ["2"]}


def test_frames() -> None:
    log = from_frame(
        {"user_id": [row[0] for row in LOG], "item_id": [row[1] for row in LOG], "ts": [30, 20, 10, 10, 20]}
    )
    assert log.histories().named() == EXPECTED
    dates = np.array(["2024-01-02", "2024-01-01"], dtype="datetime64[D]")
    frame = {"user": [1.0, 1.0], "item": ["a", "b"], "date": dates}
    assert from_frame(frame).histories().named() == {"1": ["b", "a"]}
    assert from_frame(frame, order="file").histories().named() == {"1": ["a", "b"]}
    mixed = {"user": [1, 1, 1], "item": "abc", "time": [2**60 + 1, 2**60, 0.5]}
    assert from_frame(mixed).histories().named() == {"1": ["c", "b", "a"]}, "fractions beside nanoseconds: exact"
    for values, words in (([1, None], "row 2 of the frame: the timestamp is missing"), ([1, "x"], "'x' is not a time")):
        with pytest.raises(DpformerError, match=words):
            from_frame({"user": [1, 1], "item": [2, 3], "time": values})
    with pytest.raises(DpformerError, match="no timestamp column"):
        from_frame({"user": [1], "item": [2]})


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_frames_of_libraries(library: str) -> None:
    made = pytest.importorskip(library)
    table = {"user_id": [row[0] for row in LOG], "item_id": [row[1] for row in LOG], "time": [row[3] for row in LOG]}
    frame = made.table(table) if library == "pyarrow" else made.DataFrame(table)
    assert from_frame(frame).histories().named() == EXPECTED


CELLS = {
    "whole numbers": st.integers(-3, 3),
    "large numbers": st.sampled_from([2**60 + 1, 2**60, -(2**62), 5]),
    "floats": st.sampled_from([0.5, -1.0, 2.0, -0.0, 1e15, 3.25]),
    "text": st.sampled_from(["a", " a", "b ", "7", "07", "é"]),
    "all sorts": st.sampled_from(["a", 1, 1.0, True, 2.5, Decimal("1.0"), 2**70, b"a"]),
}


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(CELLS)), st.sampled_from(["whole numbers", "large numbers", "floats"]))
def test_frames_are_read_as_one_cell_after_the_other(data: st.DataObject, ids: str, times: str) -> None:
    rows = data.draw(st.integers(1, 12))
    users, items, when = (
        data.draw(st.lists(CELLS[kind], min_size=rows, max_size=rows)) for kind in (ids, "text", times)
    )
    expected: dict[str, list[str]] = {}
    for _, user, item in sorted(zip(when, users, items, strict=True), key=lambda row: row[0]):  # stable
        expected.setdefault(id_text(user), []).append(id_text(item))
    typed = np.array(users) if ids != "all sorts" else users
    for frame in (
        {"user": users, "item": items, "time": when},
        {"user": typed, "item": np.array(items), "time": np.array(when)},
    ):
        found = from_frame(frame)
        assert found.histories().named() == expected
        assert list(found.user_ids) == list(dict.fromkeys(map(id_text, users))), "numbered as they appear"


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_dates_and_gaps_of_frames(library: str) -> None:
    made = pytest.importorskip(library)
    days = [datetime.datetime(2024, 1, 3), datetime.datetime(2024, 1, 1), datetime.datetime(1500, 1, 2)]

    def frame(**columns: list[Any]) -> Any:
        return made.table(columns) if library == "pyarrow" else made.DataFrame(columns)

    found = from_frame(frame(user_id=[7, 7, 7], item_id=["c", "b", "a"], date=days))
    assert found.histories().named() == {"7": ["a", "b", "c"]}
    with pytest.raises(DpformerError, match="row 2 of the frame has no user_id"):
        from_frame(frame(user_id=[7, None, 7], item_id=["c", "b", "a"], date=days))
    with pytest.raises(DpformerError, match="row 3 of the frame has no item_id"):
        from_frame(frame(user_id=[7, 7, 7], item_id=["c", "b", " "], date=days))
    with pytest.raises(DpformerError, match="row 1 of the frame: the timestamp is missing"):
        from_frame(frame(user_id=[7, 7, 7], item_id=["c", "b", "a"], date=[None, *days[:2]]))


BAD = {
    "empty": ("log.csv", b"", "is empty"),
    "blank": ("log.csv", b"\n \n\n", "no readable line"),
    "only a mark": ("log.csv", b"\xef\xbb\xbf", "no readable line"),
    "only a header": ("log.csv", b"user_id,item_id,ts\n", "has no rows"),
    "unknown header": ("log.csv", b"buyer,thing\na,b\n", "--user-column"),
    "no item": ("log.csv", b"user_id,thing\na,b\n", "no column 'item_id' (it has user_id, thing)"),
    "no order": ("log.csv", b"user_id,item_id\na,b\n", "give --order file if its rows are in order of time"),
    "two times": (
        "log.csv",
        b"user,item,made_at,seen_at\na,b,1,2\n",
        "several columns that may be the time (made_at, ",
    ),
    "words for times": ("log.csv", b"user_id,item_id,timestamp\na,b,1\na,b,noon\n", "row 3: the timestamp 'noon'"),
    "NaN for a time": ("log.csv", b"user_id,item_id,timestamp\na,b,nan\n", "row 2: the timestamp 'nan' is not a time"),
    "endless time": ("log.csv", b"user_id,item_id,timestamp\na,b,1e999\n", "'1e999' is not a time"),
    "no time": ("log.csv", b"user_id,item_id,timestamp\na,b,\n", "row 2: the timestamp is missing"),
    "dates and numbers": ("log.csv", b"user_id,item_id,ts\na,b,2024-01-01\na,c,5\n", "use one kind"),
    "impossible date": ("log.csv", b"user_id,item_id,ts\na,b,2024-13-01\n", "'2024-13-01' is not a time"),
    "no user": ("log.csv", b"user_id,item_id,ts\na,b,1\n,b,2\n", "row 3 has no user_id"),
    "null item": ("log.jsonl", b'{"user_id": 1, "item_id": null, "ts": 1}', "row 1 has no item_id"),
    "list for an item": ("log.jsonl", b'{"user_id": 1, "item_id": [1], "ts": 1}', "row 1 has no item_id"),
    "key missing": ("log.jsonl", b'{"user_id": 1, "item_id": 2, "ts": 1}\n{"user_id": 1}', "row 2 has no item_id"),
    "no time in JSON": ("log.jsonl", b'{"user_id": 1, "item_id": 2}', "row 1: the timestamp is missing"),
    "broken JSON": ("log.jsonl", b'{"user_id": 1, "item_id": 2, "ts": 1}\n{"user', "row 2 is not a JSON object"),
    "deep JSON": ("log.jsonl", b'{"a":' * 100_000, "is not a JSON object"),
    "JSON array": ("log.json", b'[{"user_id": 1}]', "one object per line"),
    "ragged": ("log.csv", b"user_id,item_id,ts\na,b,1\na\n", "row 3 has a different number of fields"),
    "unclosed quote": ("log.csv", b'user_id,item_id,ts\na,"b,1\nc,d,2\n', "an unclosed quote"),
    "column twice": ("log.csv", b"user_id,item_id,item_id\na,b,c\n", "two columns named 'item_id'"),
    "not UTF-8": ("log.csv", b"user_id,item_id,ts\na,b,1\n\xff,b,1\n", "line 3 is not UTF-8: give --encoding"),
    "junk": ("log.csv", bytes(range(256)) * 10, "header"),
    "one endless line": ("log.csv", b"user,item,ts\n" + b"a" * (3 << 20), "is too long for a row"),
    "UTF-16": ("log.csv", "user_id,item_id\na,b\n".encode("utf-16"), "give --encoding utf-16"),
    "torn Parquet": ("log.parquet", b"PAR1" + b"\0" * 100, "cannot be read"),
    "text named Parquet": ("log.parquet", b"user_id,item_id\na,b\n", "cannot be read"),
    "no name": ("log", b"user_id,item_id\na,b\n", "give --format, one of csv"),
    "one user": ("log.csv", b"user_id,item_id,ts\na,b,1\na,c,2\n", "only 1 user remains"),
    "nothing to learn": ("log.csv", b"user_id,item_id,ts\na,b,1\nb,c,1\n", "none of the 2 users has two items"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_give_one_sentence(tmp_path: Path, case: str) -> None:
    name, content, sentence = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DpformerError) as caught:
        prepare(tmp_path / name)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 + len(str(tmp_path))


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    good = [f"u{user},i{step},{step}" for user in range(3) for step in range(3)]
    bad = [b"a,b,noon", b"a,,1", b",b,1", b"a,b", b"\xff,b,1", b"a,b,2,3", b"z\0,b,1"]
    path.write_bytes(b"user_id,item_id,ts\n" + b"\n".join([*(row.encode() for row in good), *bad]))
    dataset = prepare(path, reading=Reading(skip_bad_rows=True))
    assert dataset.num_users == 4 and dataset.num_interactions == 9, "a is named, and has nothing"
    assert sum(dataset.description["skipped"].values()) == len(bad)
    path.write_bytes(path.read_bytes() + b'\na,"b,1\n')
    assert prepare(path, reading=Reading(skip_bad_rows=True)).num_interactions == 9
    assert prepare(path, reading=Reading(skip_bad_rows=True, quotes=False)).num_interactions == 10


def test_exact_duplicates_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user,item,ts\na,x,1\na,y,1\na,x,1\na,x,2\nb,x,1\nb,z,1\n")
    assert read(path).facts["duplicates"] == 1
    assert prepare(path).num_interactions == 6, "noticed, not removed"


def test_missing_file_folder_and_column(tmp_path: Path) -> None:
    with pytest.raises(DpformerError, match="does not exist"):
        prepare(tmp_path / "nothing.csv")
    with pytest.raises(DpformerError, match="contains no files"):
        prepare(tmp_path)
    (tmp_path / "log.csv").write_text("user_id,item_id\na,b\n")
    with pytest.raises(DpformerError, match="no column 'when'; it has user_id, item_id"):
        read(tmp_path / "log.csv", Columns(timestamp="when"))


def test_torn_parquet(tmp_path: Path) -> None:
    whole = parquet(
        tmp_path / "log.parquet", "SELECT range % 9 AS user_id, range AS item_id, 0 AS ts FROM range(9999)"
    ).read_bytes()
    for size in (6, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "log.parquet").write_bytes(whole[:size])
        with pytest.raises(DpformerError, match="cannot be read"):
            read(tmp_path / "log.parquet")
    bent = bytearray(whole)
    bent[len(whole) // 3 : len(whole) // 2] = bytes(len(whole) // 2 - len(whole) // 3)
    (tmp_path / "log.parquet").write_bytes(bent)
    try:
        read(tmp_path / "log.parquet")
    except DpformerError as error:
        assert "\n" not in str(error)


junk = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(
        st.lists(
            st.sampled_from(["1", "a", '"', "", "nan", "-3.5", "user_id", "é", " ", "1e400", "::", "\0"]), max_size=5
        )
    ).flatmap(
        lambda table: st.sampled_from([",", "\t", "::", " ", ";"]).map(
            lambda separator: "\n".join(separator.join(row) for row in table).encode()
        )
    ),
    st.lists(
        st.dictionaries(
            st.sampled_from(["user_id", "item_id", "timestamp", "x"]),
            st.one_of(
                st.none(), st.integers(), st.floats(), st.text(max_size=3), st.booleans(), st.just([1]), st.just({})
            ),
        ),
        max_size=6,
    ).map(lambda objects: "\n".join(map(json.dumps, objects)).encode()),
)


@settings(max_examples=40)
@given(
    content=junk,
    header=st.sampled_from([b"", b"user_id,item_id,timestamp\n", b"user_id:token\titem_id:token\n", b"PAR1"]),
    suffix=st.sampled_from([".csv", ".tsv", ".jsonl", ".inter", ".dat", ".txt", ".parquet", ".db", ""]),
)
def test_junk_is_a_data_set_or_a_sentence(tmp_path: Path, content: bytes, header: bytes, suffix: str) -> None:
    path = tmp_path / f"log{suffix}"
    path.write_bytes(header + content)
    try:
        dataset = prepare(path)
    except DpformerError as error:
        assert str(error)
    else:
        assert isinstance(dataset, Dataset) and dataset.num_users >= 2
    try:
        assert len(read_catalog(path))
    except DpformerError as error:
        assert str(error)


def test_a_poisoned_user(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with path.open("w") as file:
        file.write("user_id,item_id,timestamp\n")
        file.writelines(f"troll,{number % 1000},{-number}\n" for number in range(200_000))
        file.write(f"{'x' * 100_000},{'9' * 100_000},1e18\nann,1,0\nann,2,{2**62}\n")
    dataset = prepare(path, max_length=50)
    assert (dataset.num_users, dataset.num_interactions) == (3, 200_003)
    assert dataset.train(0).shape == (50,)
    batch, lengths = dataset.batch(np.arange(3))
    assert batch.shape == (3, 50) and lengths.tolist() == [50, 1, 2]


def test_real_data(real_data: Path) -> None:
    for name, sizes in {"ml-1m.txt": (6040, 3416, 999611), "amazon-games.txt": (31013, 23715, 287107)}.items():
        dataset = prepare(real_data / name)
        assert (dataset.num_users, dataset.num_items, dataset.num_interactions) == sizes
        assert dataset.vocabulary.ids[:3] == ["1", "2", "3"], "whole numbers are in order"
    assert dataset.description["split"]["train_only_users"] == 112


def test_real_ratings_with_ties(real_data: Path) -> None:
    path = real_data / "ml-100k" / "u.data"
    dataset = prepare(path)
    assert (dataset.num_users, dataset.num_items, dataset.num_interactions) == (943, 1682, 100000)
    assert dataset.description["tied_share"] > 0.7
    table = [line.split("\t") for line in path.read_text().splitlines()]
    for user in (0, 7, 942):
        mine = sorted((row for row in table if row[0] == dataset.user_ids[user]), key=lambda row: int(row[3]))
        start, stop = dataset.offsets[user : user + 2]
        assert [dataset.vocabulary.ids[item] for item in dataset.items[start:stop]] == [row[1] for row in mine]


def test_real_catalogue(real_data: Path) -> None:
    catalog = read_catalog(real_data / "ml-1m-movies.dat")
    assert len(catalog) == 3883
    assert catalog.title(0) == "Toy Story (1995)"
    assert any("é" in title for title in catalog.titles or ())
