"""Logs in PostgreSQL and MariaDB: the same sums as from the same log in a file, and nothing but reading."""

import csv
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpformer.data import Columns, Filters, Reading, prepare
from dpformer.data.histories import read
from dpformer.data.sources import mysql as mysql_source
from dpformer.errors import DpformerError
from dpformer.queries.transitions.backend import transition_sums
from tests.data.sources.servers import free_port, mysql, postgresql  # noqa: F401
from tests.tiny_runs import printed, refused
from tests.training.logs import write_log

pytest.importorskip("adbc_driver_postgresql", reason="adbc-driver-postgresql is not installed")
pytest.importorskip("pymysql", reason="pymysql is not installed")

Run = Callable[..., list[tuple[Any, ...]]]


def in_postgresql(url: str) -> Run:
    from adbc_driver_postgresql import dbapi

    def run(sql: str) -> list[tuple[Any, ...]]:
        with dbapi.connect(url) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            found = list(cursor.fetchall()) if cursor.description else []
            connection.commit()
            return found

    return run


def in_mysql(url: str) -> Run:
    import pymysql

    port = int(url.rpartition(":")[2].partition("/")[0])
    options: dict[str, Any] = {"host": "127.0.0.1", "port": port, "user": "ann", "password": "hush", "database": "shop"}

    def run(sql: str) -> list[tuple[Any, ...]]:
        with pymysql.connect(**options, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.execute("SET sql_mode = ''")
            cursor.execute(sql)
            return list(cursor.fetchall())

    return run


@pytest.fixture(params=["postgresql", "mysql"])
def database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Run]]:
    """The URL of a database, and what runs SQL in it; the environment has the password."""
    monkeypatch.setenv("PGPASSWORD", "hush")
    monkeypatch.setenv("MYSQL_PWD", "hush")
    url = request.getfixturevalue(request.param)
    run = {"postgresql": in_postgresql, "mysql": in_mysql}[request.param](url)
    run("DROP VIEW IF EXISTS late")
    run("DROP TABLE IF EXISTS events")
    run("DROP TABLE IF EXISTS other")
    yield url, run


def filled(run: Run, log: Path) -> None:
    """The table `events` of a log, its rows in another order."""
    rows = list(csv.reader(log.read_text().splitlines()[1:]))
    random.Random(7).shuffle(rows)
    run("CREATE TABLE events (user_id varchar(20), item_id varchar(20), timestamp bigint)")
    values = ", ".join(f"('{user}', '{item}', {time})" for user, item, time in rows)
    run(f"INSERT INTO events VALUES {values}")


def sums_of(*given: Any, **options: Any) -> tuple[list[str], np.ndarray]:
    dataset = prepare(*given, **options)
    with transition_sums(dataset, "numpy") as sums:
        return list(dataset.vocabulary.ids), sums.items(dataset.num_items)


def test_the_same_log_gives_the_same_histories_and_sums(database: tuple[str, Run], tmp_path: Path) -> None:
    url, run = database
    log = write_log(tmp_path / "log.csv")
    filled(run, log)
    assert read(url).named() == read(log).named()
    (names, found), (expected_names, expected) = sums_of(url), sums_of(log)
    assert names == expected_names
    np.testing.assert_array_equal(found, expected)
    assert prepare(url).hash == prepare(url).hash, "rows of a database have no order; what is read does"
    for reading, options in (
        (Reading(table="events"), {"filters": Filters(where="item_id <> 'i3'")}),
        (Reading(query="SELECT * FROM events WHERE item_id <> 'i3';"), {}),
    ):
        named = read(url, reading=reading, **options).named()
        assert {user: items for user, items in named.items() if items} == {
            user: items for user, items in read(log, filters=Filters(where="item_id <> 'i3'")).named().items() if items
        }


def test_one_command_trains_and_evaluates(database: tuple[str, Run], tmp_path: Path) -> None:
    url, run = database
    filled(run, write_log(tmp_path / "log.csv"))
    out = tmp_path / "run"
    printed("train", url, "--table", "events", "--out", out, "--epsilon", 8, "--model", "counts")
    assert "users" in printed("evaluate", out, "--json", "--samples", 10)
    written = "".join(path.read_text(errors="replace") for path in out.rglob("*") if path.is_file())
    assert "events" in written and "hush" not in written


def test_types_of_a_database_are_read_like_those_of_a_file(database: tuple[str, Run]) -> None:
    url, run = database
    kinds = (
        ("uuid", "numeric(20, 0)", "timestamp with time zone", "'2024-01-01 02:00:00+02'")
        if url.startswith("postgresql")
        else ("varchar(40)", "bigint unsigned", "datetime(6)", "'2024-01-01 00:00:00.000000'")
    )
    run(f"CREATE TABLE events (who {kinds[0]}, what {kinds[1]}, created_at {kinds[2]}, stars double precision)")
    users = [f"00000000-0000-0000-0000-{n:012d}" for n in range(3)]
    rows = [f"('{user}', {2**63 + n}, {kinds[3]}, {n})" for user in users for n in range(4)]
    run(f"INSERT INTO events VALUES {', '.join(rows)}")
    columns = Columns(user="who", item="what")
    log = read(url, columns, filters=Filters(min_rating=1.0))
    assert log.named() == {user: [str(2**63 + n) for n in (1, 2, 3)] for user in users}
    assert log.facts["time_range"] == [1704067200.0, 1704067200.0], "in UTC"
    assert log.facts["format"] in ("PostgreSQL", "MySQL") and log.facts["duplicates"] == 0


def test_a_date_that_is_none_is_a_bad_row(mysql: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    monkeypatch.setenv("MYSQL_PWD", "hush")
    monkeypatch.setattr(mysql_source, "ROWS_AT_ONCE", 3)
    run = in_mysql(mysql)
    run("DROP TABLE IF EXISTS events")
    run("CREATE TABLE events (user_id int, item_id int, created_at datetime)")
    run(
        "INSERT INTO events VALUES (1, 1, '2024-01-01'), (1, 2, '2024-01-02'), (2, 1, '0000-00-00'), "
        "(2, 2, '2024-01-05')"
    )
    with pytest.raises(DpformerError, match="the timestamp is missing"):
        read(mysql)
    assert read(mysql, reading=Reading(skip_bad_rows=True)).named() == {"1": ["1", "2"], "2": ["2"]}


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM events",
        "DROP TABLE events",
        "SELECT 1) AS x; DROP TABLE events; SELECT * FROM (SELECT 1",
        "WITH gone AS (DELETE FROM events RETURNING *) SELECT * FROM gone",
    ],
)
def test_a_query_reads_and_nothing_else(database: tuple[str, Run], tmp_path: Path, query: str) -> None:
    url, run = database
    filled(run, write_log(tmp_path / "log.csv"))
    before = run("SELECT count(*) FROM events")
    assert "cannot be read" in refused("data", url, "--query", query)
    assert run("SELECT count(*) FROM events") == before


def test_a_function_that_writes_is_refused(postgresql: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("PGPASSWORD", "hush")
    run = in_postgresql(postgresql)
    run("DROP SEQUENCE IF EXISTS counter")
    run("CREATE SEQUENCE counter")
    said = refused("data", postgresql, "--query", "SELECT 1 AS user_id, 2 AS item_id, nextval('counter') AS timestamp")
    assert "read-only transaction" in said


def test_what_cannot_be_read_is_one_sentence(
    database: tuple[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, run = database
    filled(run, write_log(tmp_path / "log.csv"))
    run("CREATE TABLE other (n int)")
    scheme, _, place = url.partition("://")
    place = place.partition("@")[2]
    for given, sentence in {
        (url,): "name one with --table",
        (url, "--table", "nothing"): "cannot be read: ",
        (url, "--table", "other"): "no column 'user_id'",
        (url, "--table", "events", "--user-column", "buyer"): "no column 'buyer'",
        (url, "--table", "events", "--order", "file"): "have no order",
        (url, "--table", "events", "--format", "csv"): "--format is for files",
        (f"{scheme}://bob@{place}",): "may not be read with the user and password",
        (f"{scheme}://ann@127.0.0.1:{free_port()}/shop",): "cannot be reached",
        (f"{scheme}://ann@host.invalid/shop",): "cannot be reached",
        (f"{scheme}://ann@{place.partition('/')[0]}",): "names no database",
        (f"{scheme}://ann:hush@{place}",): "contains a password",
    }.items():
        said = refused("data", *given)
        assert sentence in said and "hush" not in said, given
    monkeypatch.setenv("PGPASSWORD", "wrong")
    monkeypatch.setenv("MYSQL_PWD", "wrong")
    said = refused("train", url, "--table", "events", "--out", tmp_path / "run")
    assert "may not be read with the user and password" in said and "wrong" not in said
    assert not (tmp_path / "run").exists()


def test_other_machines_are_read_with_encryption_alone(
    postgresql: str,  # noqa: F811
    mysql: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """127.0.0.2 is not named as this machine, and the servers of the tests have no certificate."""
    monkeypatch.setenv("PGPASSWORD", "hush")
    said = refused("data", postgresql.replace("127.0.0.1", "127.0.0.2"))
    assert "SSL was required" in said
    database = mysql_source.Database
    from dpformer.data.sources.urls import Url

    assert database(Url("mysql://ann@127.0.0.1/shop"))._encryption() is None
    required = database(Url("mysql://ann@db.example.org/shop"))._encryption()
    verified = database(Url("mysql://ann@db.example.org/shop?ssl-mode=VERIFY_IDENTITY"))._encryption()
    assert required is not None and verified is not None and verified.check_hostname and not required.check_hostname
    with pytest.raises(DpformerError, match="may stand ssl-mode"):
        database(Url("mysql://ann@db.example.org/shop?ssl=0"))._encryption()
