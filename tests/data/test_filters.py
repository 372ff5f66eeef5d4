"""Filters of rows: the same in every format, each row by itself, and nobody leaves N by them."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Columns, Filters, Reading, from_frame, prepare, read
from dpformer.data.row_filter import RowFilter
from dpformer.data.time_window import NS, Window
from dpformer.errors import DpformerError
from tests.tiny_runs import printed, refused
from tests.training.memo import accountant_remembers  # noqa: F401

NAMES = ("user_id", "item_id", "event", "price", "ts")
ROWS: list[tuple[Any, ...]] = [
    ("a", "x", "view", 1.5, 1_700_000_000),
    ("a", "y", "purchase", 20.0, 1_700_000_100),
    ("b", "x", "purchase", None, 1_700_000_200),
    ("b", None, "search", None, 1_700_000_300),  # a row that means nothing to a model has no item
    ("c", "z", "view", 3.0, 1_700_000_400),
    (None, None, "search", None, 1_700_000_500),  # and may be nobody's
]


def text(value: Any) -> str:
    return "" if value is None else str(value)


def as_csv(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    lines = [",".join(map(text, row)) for row in rows]
    path.with_suffix(".csv").write_text("\n".join([",".join(NAMES), *lines]) + "\n")
    return path.with_suffix(".csv")


def as_quoted_csv(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    """Quotes take the other way of reading lines."""
    lines = [",".join(f'"{text(value)}"' for value in row) for row in rows]
    path.with_suffix(".csv").write_text("\n".join([",".join(NAMES), *lines]) + "\n")
    return path.with_suffix(".csv")


def as_json(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    lines = [json.dumps(dict(zip(NAMES, row, strict=True))) for row in rows]
    path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    return path.with_suffix(".jsonl")


def as_duckdb(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    with duckdb.connect(str(path.with_suffix(".duckdb"))) as connection:
        connection.execute(
            "CREATE TABLE log (user_id VARCHAR, item_id VARCHAR, event VARCHAR, price DOUBLE, ts BIGINT)"
        )
        connection.executemany("INSERT INTO log VALUES (?, ?, ?, ?, ?)", rows)
    return path.with_suffix(".duckdb")


def as_parquet(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    database = as_duckdb(path, rows)
    with duckdb.connect(str(database)) as connection:
        connection.execute(f"COPY log TO '{path.with_suffix('.parquet')}' (FORMAT parquet)")
    return path.with_suffix(".parquet")


def as_sqlite(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    with sqlite3.connect(path.with_suffix(".sqlite")) as connection:
        connection.execute(f"CREATE TABLE log ({', '.join(NAMES)})")
        connection.executemany("INSERT INTO log VALUES (?, ?, ?, ?, ?)", rows)
    return path.with_suffix(".sqlite")


WRITERS = [as_csv, as_quoted_csv, as_json, as_duckdb, as_parquet, as_sqlite]
VIEW_OR_DEAR = "event <> 'search' AND coalesce(TRY_CAST(price AS DOUBLE), 9) > 2"
FILTERED: list[tuple[Filters, dict[str, list[str]]]] = [
    (Filters(where="event = 'purchase'"), {"a": ["y"], "b": ["x"], "c": []}),
    (Filters(where=VIEW_OR_DEAR), {"a": ["y"], "b": ["x"], "c": ["z"]}),
    (Filters(where="event NOT IN ('search') AND price IS NULL"), {"a": [], "b": ["x"], "c": []}),
    (Filters(where="event LIKE '%w'", since="1700000100"), {"a": [], "b": [], "c": ["z"]}),
    (Filters(where="event <> 'search'", until="2023-11-14T22:16:40Z"), {"a": ["x", "y"], "b": [], "c": []}),
    (
        Filters(where=VIEW_OR_DEAR, since="2023-11-14T22:15", until="2023-11-14T22:20"),
        {"a": ["y"], "b": ["x"], "c": []},
    ),
]


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_keeps_the_same_rows(write: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "log", ROWS)
    for filters, expected in FILTERED:
        found = read(path, filters=filters)
        assert found.named() == expected, filters
        assert found.facts["read"]["items"] == 3


@pytest.mark.parametrize("write", WRITERS)
def test_rows_that_pass_must_be_whole(write: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "log", ROWS)
    with pytest.raises(DpformerError, match="has no item_id"):
        read(path, filters=Filters(where="event <> 'view'"))
    found = read(path, reading=Reading(skip_bad_rows=True), filters=Filters(where="event <> 'view'"))
    assert found.facts["skipped"] == {"no item": 1, "no user": 1} and found.named()["b"] == ["x"]


def test_users_are_counted_before_any_filter(tmp_path: Path) -> None:
    path = as_csv(
        tmp_path / "log", [(f"u{n}", f"i{t}", "view" if n else "bot", 1.0, t) for n in range(9) for t in range(4)]
    )
    for filters in (Filters(where="event = 'view'"), Filters(where="user_id <> 'u0'"), Filters(since="1", until="3")):
        assert prepare(path, filters=filters).num_users == 9


def test_names_of_columns(tmp_path: Path) -> None:
    rows = tmp_path / "log.csv"
    rows.write_text("user_id,item_id,ts,Event Type,user,where:0\na,x,1,Buy,n,1\na,y,2,see,m,0\n")
    for condition in (
        "\"Event Type\" = 'Buy'",
        "\"event type\" = 'Buy'",
        "user = 'n'",
        "\"where:0\" = '1' AND user = 'n'",
    ):
        assert read(rows, filters=Filters(where=condition)).named() == {"a": ["x"]}, condition
    with pytest.raises(DpformerError, match=r"a column 'kind', but .* has user_id, item_id"):
        read(rows, filters=Filters(where="kind = 1"))
    assert len(read(rows, filters=Filters(where="")).codes) == 2


def test_text_is_not_compared_with_numbers(tmp_path: Path) -> None:
    path = as_csv(tmp_path / "log", ROWS)
    for condition in ("price > 5", "CAST(event AS INT) = 1"):
        with pytest.raises(DpformerError, match=r"TRY_CAST\(price AS DOUBLE\) > 5"):
            read(path, filters=Filters(where=condition))


REFUSED = [
    ("event = (SELECT min(event) FROM log)", "a subquery"),
    ("EXISTS (SELECT 1)", "a subquery"),
    ("event IN (SELECT event FROM log)", "a subquery"),
    ("count(*) > 1", "the function count_star"),
    ("sum(price) > 1", "the function sum"),
    ("max(price) FILTER (WHERE true) > 1", "the function max"),
    ("row_number() OVER () < 10", "a window function"),
    ("lag(event) OVER (ORDER BY ts) = 'view'", "a window function"),
    ("random() < 0.5", "the function random"),
    ("ts > now()", "the function now"),
    ("nextval('s') = event", "the function nextval"),
    ("getenv('HOME') = event", "the function getenv"),
    ("getvariable('x') = event", "the function getvariable"),
    ("current_setting('memory_limit') = event", "the function current_setting"),
    ("list_filter([event], lambda e: e = 'view') = []", "the function list_filter"),
    ("* = 3", r"\*"),
    ("COLUMNS(*) = 'x'", r"\*"),
    ("event = ?", "a parameter|more than one"),
    ("event = $1", "a parameter|more than one"),
    ("log.event = 'view'", "log.event is not a column name"),
    ("event = 'view') GROUP BY (event", "more than one condition"),
    ("event = 'view') LIMIT (1", "more than one condition"),
    ("event = 'view') UNION SELECT (1", "more than one condition"),
    ("event = 'view' ORDER BY event", "not a condition"),
    ("event = 'view'; DROP TABLE log", "not a condition"),
    ("event = 'view", "not a condition"),
    ("1 = 1", "names no column"),
    ("true", "names no column"),
    ("other.lower(event) = 'x'", "the function"),
]


@pytest.mark.parametrize(("condition", "says"), REFUSED)
def test_what_could_look_beyond_its_row_is_refused(condition: str, says: str) -> None:
    with pytest.raises(DpformerError, match=says):
        Filters(where=condition)


def test_what_runs_is_written_from_the_checked_tree() -> None:
    found = RowFilter.parse("event = 'it''s' /* a comment */ -- another")
    assert found.sql == "(\"where:0\" = 'it''s')" and found.columns == ("event",)


CELLS = st.sampled_from(["view", "buy", "", "2", "10", "x y", "it's"])


@settings(max_examples=15)  # up to 8 files each
@given(st.lists(st.tuples(st.sampled_from("abc"), CELLS, CELLS), min_size=1, max_size=7), st.data())
def test_no_row_decides_about_another(tmp_path: Path, rows: list[tuple[str, str, str]], data: st.DataObject) -> None:
    """Each row passes or not as it does alone."""
    condition = data.draw(st.sampled_from([
        "p = 'view' OR q = 'buy'", "length(p) > TRY_CAST(q AS INTEGER)", "p IS NULL", "coalesce(q, 'none') <> p",
        "CASE WHEN p = 'x y' THEN q = 'view' ELSE upper(p) = 'BUY' END", "p || q LIKE '%v%'",
    ]))  # fmt: skip

    def kept(chosen: list[tuple[int, tuple[str, str, str]]]) -> set[str]:
        path = tmp_path / "log.csv"
        lines = [f'{user},r{number},{number},"{p}","{q}"' for number, (user, p, q) in chosen]
        path.write_text("\n".join(["user_id,item_id,ts,p,q", *lines]) + "\n")
        try:
            return {item for items in read(path, filters=Filters(where=condition)).named().values() for item in items}
        except DpformerError as error:
            assert "leave none" in str(error)
            return set()

    together = kept(list(enumerate(rows)))
    assert together == set().union(*(kept([one]) for one in enumerate(rows)))


def in_window(value: int, since: int | None, until: int | None, unit: int) -> bool:
    moment = value * (NS // unit)
    return (since is None or moment >= since * NS) and (until is None or moment < until * NS)


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as made:
        yield made


@given(st.integers(1_000_000_000, 2_000_000_000), st.integers(-3, 3), st.sampled_from([1, 10**3, 10**6, 10**9]))
def test_a_date_is_compared_with_numbers_in_their_own_unit(
    connection: duckdb.DuckDBPyConnection, second: int, off: int, unit: int
) -> None:
    """A naive twin in whole numbers: the first moment of the window is in it, the last is not."""
    value = second * unit + off
    for since, until in ((second, None), (None, second), (second - 1, second + 1)):
        dates = [None if s is None else _iso(s) for s in (since, until)]
        window = Window.parse(*dates)
        assert window is not None
        query = f"SELECT {window.sql('false')} FROM (SELECT CAST({value} AS BIGINT) AS t, 0 AS f)"
        (found,) = connection.execute(query).fetchone() or (None,)
        assert found == in_window(value, since, until, unit), (value, since, until)


def _iso(second: int) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(second, datetime.timezone.utc).isoformat()


def test_windows_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for since, until, says in (
        ("yesterday", None, "--since is 'yesterday'; it must be a date"),
        ("2024-01-02", "2024-01-01", "the window is empty"),
        ("5", "2024-01-01", "give two dates or two numbers"),
    ):
        with pytest.raises(DpformerError, match=says):
            Filters(since=since, until=until)
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,ts\na,x,2024-01-31\na,y,2024-02-01\n")
    assert read(path, filters=Filters(until="2024-02-01")).named() == {"a": ["x"]}
    assert read(path, filters=Filters(since="2024-01-31T02:00:00+02:00")).named() == {"a": ["x", "y"]}
    with pytest.raises(DpformerError, match="are dates: give a date"):
        read(path, filters=Filters(since="1700000000"))
    with pytest.raises(DpformerError, match="in file order"):
        read(path, reading=Reading(order="file"), filters=Filters(since="2024-01-31"))
    lines = tmp_path / "log.txt"
    lines.write_text("a x y\nb y x\n")
    with pytest.raises(DpformerError, match="needs named columns"):
        read(lines, reading=Reading(columns="user,items"), filters=Filters(where="x = 1"))
    frame = from_frame({"user_id": ["a"], "item_id": ["x"], "ts": [1]}, Columns())
    with pytest.raises(DpformerError, match="--where applies to files"):
        frame.histories(Filters(where="user_id = 'a'"))


def test_a_run_states_its_filters_and_recommends_by_them(tmp_path: Path) -> None:
    rows = [
        (f"u{n}", f"i{(n + t) % 9}", "view" if t % 2 else "buy", 1.0, 1_700_000_000 + t)
        for n in range(60)
        for t in range(8)
    ]
    log = as_csv(tmp_path / "log", rows)
    (tmp_path / "items.csv").write_text("item_id\n" + "".join(f"i{n}\n" for n in range(9)))
    run = tmp_path / "run"
    options = ("--where", "event = 'buy'", "--until", "2023-11-14T22:13:26", "--epsilon", 8)
    printed("train", log, "--catalog", tmp_path / "items.csv", "--out", run, *options)
    facts = json.loads((run / "privacy.json").read_text())
    assert facts["data"][0] == "Only interactions with event = 'buy' were used (a condition on each row by itself)."
    assert facts["data"][1] == "Only interactions before 2023-11-14T22:13:26 were used."
    assert "contradicts the statement" in printed("verify", run)
    lines = printed("recommend", run, "--histories", log, "--json", "-k", 9).splitlines()
    first = {found["item_id"] for found in json.loads(lines[0])["recommendations"]}
    assert first == {f"i{n}" for n in (1, 3, 5, 7, 8)}, "bought until today: the window is of training"
    assert "contains a subquery" in refused("train", log, "--where", "event = (SELECT 1)", "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert "where applies to logs of items" in refused(
        "train", log, "--task", "lm", "--unit", "line", "--where", "a = 1"
    )
