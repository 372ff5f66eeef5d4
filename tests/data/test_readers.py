"""Readers: one log in every format gives the same interactions; bad files give one sentence."""

import json
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpformer.data import Columns, Dataset, Interactions, prepare, read, read_catalog
from dpformer.errors import DpformerError, MissingExtra

LOG = [
    ("ann", "x", 3.0, 30),
    ("bob", "7", 5.0, 20),
    ("ann", "z y", 1.5, 10),
    ("cé", "x", 4.0, 10),
    ("bob", "q", 2.0, 20),
]


def rows(log: Interactions) -> list[tuple]:
    times = [None] * len(log) if log.timestamps is None else log.timestamps.tolist()
    return [
        (log.user_ids[user], log.item_ids[item], time)
        for user, item, time in zip(log.users, log.items, times, strict=True)
    ]


EXPECTED = [(user, item, time) for user, item, _, time in LOG]


def lines(separator: str, header: str = "", end: str = "\n") -> str:
    return header + end.join(separator.join(map(str, row)) for row in LOG)


def parquet(path: Path, query: str) -> Path:
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({query}) TO '{path}' (FORMAT parquet)")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.csv", lines(",", "user_id,item_id,rating,timestamp\n")),
        ("log.csv", lines(",", "User ID,movieId,rating,timestamp\r\n", "\r\n") + "\r\n\r\n"),
        ("log.csv", lines(";", "user;item;rating;time\n")),
        ("log.csv", lines(",")),  # as Amazon's: no header, user,item,rating,timestamp
        ("log.tsv", lines("\t", "user_id\titem_id\trating\ttimestamp\n") + "\n  \n"),
        ("u.data", lines("\t")),
        ("log.inter", lines("\t", "user_id:token\titem_id:token\trating:float\ttimestamp:float\n")),
        ("ratings.dat", lines("::")),
        ("log.jsonl", "\n".join(json.dumps({"user_id": u, "item_id": i, "timestamp": t}) for u, i, _, t in LOG)),
        ("log.csv", '"uid","x","item","time"\n' + "".join(f'"{u}","a, ""b""\nc",{i},{t}\n' for u, i, _, t in LOG)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bom", [False, True])
def test_every_format_reads_the_same(tmp_path: Path, name: str, text: str, bom: bool) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8-sig" if bom else "utf-8", newline="")
    assert rows(read(path)) == EXPECTED


def test_parquet_reads_the_same(tmp_path: Path) -> None:
    values = ", ".join(f"('{u}', '{i}', {r}, {t})" for u, i, r, t in LOG)
    query = f"SELECT * FROM (VALUES {values}) AS log(user_id, item_id, rating, timestamp)"
    assert rows(read(parquet(tmp_path / "log.parquet", query))) == EXPECTED
    assert rows(read(parquet(tmp_path / "what[e]ver*", query))) == EXPECTED, "known by its bytes; the name is no glob"


def test_parquet_of_numbers_and_instants(tmp_path: Path) -> None:
    instant = "TIMESTAMP '1970-01-01 00:00:01' + INTERVAL (range) MINUTE"
    query = f"SELECT range % 3 AS uid, range::DECIMAL(9,1) AS sku, {instant} AS at FROM range(6)"
    log = read(parquet(tmp_path / "log.parquet", query), Columns(item="sku", timestamp="at"))
    assert rows(log)[:4] == [
        ("0", "0.0", 1000000),
        ("1", "1.0", 61000000),
        ("2", "2.0", 121000000),
        ("0", "3.0", 181000000),
    ]


def test_parquet_keeps_file_order(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    with duckdb.connect() as connection:
        rows = "SELECT range % 7 AS user_id, range::DOUBLE AS item_id FROM range(60000)"
        connection.execute(f"COPY ({rows}) TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE 2048)")
    log = read(path)
    assert [log.item_ids[item] for item in log.items] == [str(number) for number in range(60000)]


def test_plain_lines_have_no_times(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("1 10\n1   11\n\n2\t10\n")
    assert rows(read(path)) == [("1", "10", None), ("1", "11", None), ("2", "10", None)]


def test_space_separated_ratings(tmp_path: Path) -> None:
    path = tmp_path / "u.data"
    path.write_text("1 10 5 100\n1 11 3 99\n2 10 4 7")
    log = read(path, ratings=True)
    assert rows(log) == [("1", "10", 100), ("1", "11", 99), ("2", "10", 7)]
    assert log.ratings is not None and log.ratings.tolist() == [5, 3, 4]


def test_latin_1_is_read_where_utf_8_fails(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"user_id,item_id\n" + b"a,b\n" * 200_000 + "zoé,ü\n".encode("latin-1"))
    assert rows(read(path))[-1] == ("zoé", "ü", None)
    assert len(read(path)) == 200_001


def test_numbers_and_text_are_one_id(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"user": 7, "item": " a"}\n{"user": "7", "item": "a "}\n{"user": "07", "item": "a"}\n')
    log = read(path)
    assert list(log.user_ids) == ["7", "07"] and list(log.item_ids) == ["a"]


def test_nanoseconds_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    late, early = 1_700_000_000_000_000_001, 1_700_000_000_000_000_000
    path.write_text(f"user_id,item_id,timestamp\na,2,{late}\na,1,{early}\nb,1,{early}\n")
    assert prepare(path).items.tolist()[:2] == [0, 1]


def test_columns_by_option(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("用户,sku,at\na,1,5\nb,2,6\n", encoding="utf-8")
    assert rows(read(path, Columns("用户", "sku", "at"))) == [("a", "1", 5), ("b", "2", 6)]
    path.write_text("5,a,1\n6,b,2\n")
    assert rows(read(path, Columns("2", "3", "1"))) == [("a", "1", 5), ("b", "2", 6)]


BAD = {
    "empty": ("log.csv", b"", "is empty"),
    "blank": ("log.csv", b"\n \n\n", "is empty"),
    "only a mark": ("log.csv", b"\xef\xbb\xbf", "is empty"),
    "only a header": ("log.csv", b"user_id,item_id\n", "a header and no rows"),
    "unknown header": ("log.csv", b"customer,sku\na,b\n", "--user-column"),
    "three columns, no header": ("log.txt", b"1 2 3\n", "--user-column"),
    "no item": ("log.csv", b"user_id,sku\na,b\n", "no column 'item_id' (it has user_id, sku)"),
    "words for times": ("log.csv", b"user_id,item_id,timestamp\na,b,1\na,b,noon\n", "row 3: the timestamp 'noon'"),
    "NaN for a time": ("log.csv", b"user_id,item_id,timestamp\na,b,nan\n", "not a finite number"),
    "endless time": ("log.csv", b"user_id,item_id,timestamp\na,b,1e999\n", "not a finite number"),
    "no time": ("log.csv", b"user_id,item_id,timestamp\na,b,\n", "not a finite number"),
    "no user": ("log.csv", b"user_id,item_id\na,b\n,b\n", "row 3 has no user_id"),
    "null item": ("log.jsonl", b'{"user_id": 1, "item_id": null}', "row 1 has no item_id"),
    "list for an item": ("log.jsonl", b'{"user_id": 1, "item_id": [1]}', "row 1 has no item_id"),
    "key missing": ("log.jsonl", b'{"user_id": 1, "item_id": 2}\n{"user_id": 1}', "row 2 has no 'item_id'"),
    "broken JSON": ("log.jsonl", b'{"user_id": 1, "item_id": 2}\n{"user', "line 2 is not JSON"),
    "deep JSON": ("log.jsonl", b'{"a":' * 100_000, "is not JSON"),
    "JSON array": ("log.json", b'[{"user_id": 1}]', "one object a line"),
    "ragged": ("log.csv", b"user_id,item_id\na,b\na\n", "row 3 has 1 fields"),
    "unclosed quote": ("log.csv", b'user_id,item_id\na,"b\nc,d\n', "not well-formed CSV"),
    "column twice": ("log.csv", b"user_id,item_id,item_id\na,b,c\n", "two columns 'item_id'"),
    "junk": ("log.csv", bytes(range(256)) * 10, "is not a text file"),
    "one endless line": ("log.csv", b"a" * (2 << 20), "is not a table"),
    "UTF-16": ("log.csv", "user_id,item_id\na,b\n".encode("utf-16"), "is not a text file"),
    "torn Parquet": ("log.parquet", b"PAR1" + b"\0" * 100, "not a readable Parquet file"),
    "text named Parquet": ("log.parquet", b"user_id,item_id\na,b\n", "not a readable Parquet file"),
    "one user": ("log.csv", b"user_id,item_id\na,b\na,c\n", "1 user is left"),
    "nothing to learn": ("log.csv", b"user_id,item_id\na,b\nb,c\n", "none of 2 users has two items"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_give_one_sentence(tmp_path: Path, case: str) -> None:
    name, content, sentence = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DpformerError) as caught:
        prepare(tmp_path / name)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 + len(str(tmp_path))


def test_missing_file_folder_and_column(tmp_path: Path) -> None:
    with pytest.raises(DpformerError, match="does not exist"):
        prepare(tmp_path / "nothing.csv")
    with pytest.raises(DpformerError, match="is a folder"):
        prepare(tmp_path)
    (tmp_path / "log.csv").write_text("user_id,item_id\na,b\n")
    with pytest.raises(DpformerError, match="no column 'when'; it has user_id, item_id"):
        read(tmp_path / "log.csv", Columns(timestamp="when"))


def test_torn_parquet(tmp_path: Path) -> None:
    whole = parquet(
        tmp_path / "log.parquet", "SELECT range % 9 AS user_id, range AS item_id FROM range(9999)"
    ).read_bytes()
    for size in (6, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "log.parquet").write_bytes(whole[:size])
        with pytest.raises(DpformerError, match="not a readable Parquet file"):
            read(tmp_path / "log.parquet")
    bent = bytearray(whole)
    bent[len(whole) // 3 : len(whole) // 2] = bytes(len(whole) // 2 - len(whole) // 3)
    (tmp_path / "log.parquet").write_bytes(bent)
    try:
        read(tmp_path / "log.parquet")
    except DpformerError as error:
        assert "\n" not in str(error)


def test_without_duckdb_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "log.parquet", "SELECT 1 AS user_id, 2 AS item_id")
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'dpformer\[parquet\]'"):
        read(path)


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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=junk,
    header=st.sampled_from([b"", b"user_id,item_id,timestamp\n", b"user_id:token\titem_id:token\n", b"PAR1"]),
    suffix=st.sampled_from([".csv", ".tsv", ".jsonl", ".inter", ".dat", ".txt", ".parquet", ""]),
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
        file.write(f"{'x' * 100_000},{'9' * 100_000},1e300\nann,1,0\nann,2,{2**63}\n")
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
