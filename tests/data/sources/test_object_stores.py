"""Logs in a bucket, read over HTTP from a server that speaks S3: the same sums as from the same files here."""

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import duckdb
import pytest

from dpformer.data import Dataset, Filters, Reading, prepare
from dpformer.data.histories import read
from dpformer.data.sources import object_stores
from dpformer.errors import DpformerError
from tests.data.sources.servers import free_port, s3  # noqa: F401
from tests.tiny_runs import printed, refused
from tests.training.logs import write_log

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'dpformer[cloud]'")


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:  # noqa: F811
    """What is written to this folder and given to `put` is in the bucket; the environment has what it takes to read."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "mine",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_stores, "TIMEOUT", object_stores.TIMEOUT / 10)
    return tmp_path / "bucket"


def logged(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_log(path)


def put(folder: Path, bucket_name: str) -> None:
    """Makes a bucket of the files of a folder."""
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket_name)
    for file in folder.rglob("*"):
        if file.is_file():
            client.upload_file(str(file), bucket_name, str(file.relative_to(folder)))


def same(found: Dataset, expected: Dataset) -> bool:
    return found.hash == expected.hash and list(found.user_ids) == list(expected.user_ids)


def test_files_folders_and_globs_are_the_same_log(bucket: Path, tmp_path: Path) -> None:
    log = logged(bucket / "one" / "log.csv")
    parts = bucket / "parts" / "events"
    for day in (1, 2):
        (parts / f"day={day}").mkdir(parents=True)
        rows = f"SELECT * FROM read_csv('{log}') WHERE hash(item_id) % 2 = {day - 1}"
        duckdb.execute(f"COPY ({rows}) TO '{parts}/day={day}/rows.parquet' (FORMAT parquet)")
    (parts / "_SUCCESS").touch()
    put(bucket, "shop")
    assert same(prepare("s3://shop/one/log.csv"), prepare(log))
    for name in ("s3://shop/parts/events", "s3://shop/parts/events/", "s3://shop/parts/**/*.parquet"):
        assert same(prepare(name), prepare(parts))
    found = printed("data", "s3://shop/parts/events", "--where", "day = '2'")
    assert f"{prepare(parts).description['read']['users']:,} users" in found
    run = tmp_path / "run"
    printed("train", "s3://shop/one/log.csv", "--out", run, "--epsilon", 8, "--model", "counts")
    assert "s3:/shop/one/log.csv" in (run / "config.toml").read_text()
    assert "very-secret" not in "".join(path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())
    assert "users" in printed("evaluate", run, "--json", "--samples", 10)


def test_a_cache_belongs_to_one_state_of_the_objects(bucket: Path, tmp_path: Path) -> None:
    log = logged(bucket / "log.csv")
    put(bucket, "kept")
    cache = tmp_path / "cache"
    first = prepare("s3://kept/log.csv", cache=cache)
    assert prepare("s3://kept/log.csv", cache=cache).folder == first.folder
    log.write_text(log.read_text() + "u0,i1,999999\n")
    put(bucket, "kept")
    assert prepare("s3://kept/log.csv", cache=cache).num_interactions == first.num_interactions + 1


def test_files_of_a_table_are_not_read_one_by_one(bucket: Path) -> None:
    table = bucket / "table"
    logged(table / "day=1" / "part.csv")
    (table / "_delta_log").mkdir()
    (table / "_delta_log" / "00000000000000000000.json").write_text("{}")
    put(bucket, "lake")
    for name in ("s3://lake/table/day=1", "s3://lake/table/day=1/part.csv", "s3://lake/table/**", "s3://lake"):
        assert "part of a table of Delta Lake" in refused("data", name)
    assert "cannot be read as a Delta table" in refused("data", "s3://lake/table")


def test_a_delta_table_is_read_by_its_log(bucket: Path, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'dpformer[delta]'")
    log = logged(tmp_path / "log.csv")
    rows = duckdb.sql(f"SELECT * FROM read_csv('{log}')").to_arrow_table()
    deltalake.write_deltalake(str(bucket / "table"), rows)
    deltalake.DeltaTable(str(bucket / "table")).delete("item_id = 'i3'")
    put(bucket, "delta")
    kept = {user: items for user, items in read(log, filters=Filters(where="item_id <> 'i3'")).named().items() if items}
    assert read("s3://delta/table").named() == kept
    assert read("s3://delta/table", reading=Reading(snapshot="0")).named() == read(log).named()
    first = prepare("s3://delta/table", cache=tmp_path / "cache")
    assert prepare("s3://delta/table", cache=tmp_path / "cache").folder == first.folder


def test_what_cannot_be_read_is_one_sentence(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged(bucket / "log.csv")
    put(bucket, "other")
    assert refused("data", "s3://other/nothing.csv") == "nothing found at s3://other/nothing.csv"
    assert refused("data", "s3://no-such-bucket/x") == "nothing found at s3://no-such-bucket/x"
    assert "column 'buyer'" in refused("data", "s3://other/log.csv", "--user-column", "buyer")
    assert "brackets" in refused("data", "s3://other/[a].csv")
    assert "ftp:// is unknown" in refused("data", "ftp://host/log.csv")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    said = refused("data", "s3://other/log.csv")
    assert "cannot be reached" in said and "very-secret" not in said


def test_a_url_with_a_secret_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for url in ("https://ann:hush@example.org/log.csv", "https://example.org/log.csv?X-Amz-Signature=hush"):
        said = refused("train", url, "--out", tmp_path / "run")
        assert "hush" not in said and "remove it" in said
    assert not (tmp_path / "run").exists()


@pytest.fixture
def website(tmp_path: Path) -> Iterator[str]:
    served = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_a_file_of_a_website(website: str, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv")
    assert same(prepare(f"{website}/log.csv"), prepare(log))
    assert refused("data", f"{website}/no.csv") == f"nothing found at {website}/no.csv"
    with pytest.raises(DpformerError, match="unencrypted: give https://"):
        prepare("http://example.org/log.csv")
