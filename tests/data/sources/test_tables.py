"""Delta and Iceberg tables, written by their own libraries: rows that were deleted stay away, a state has a number."""

import json
import struct
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from dpformer.data import Filters, Reading, prepare
from dpformer.data.histories import read
from dpformer.errors import DpformerError
from dpformer.queries.transitions.backend import transition_sums
from dpformer.runs.folder import RunFolder
from tests.commands import command
from tests.tiny_runs import invoke, printed, refused
from tests.training.logs import write_log

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'dpformer[delta]'")
pytest.importorskip("pyiceberg", reason="pyiceberg is not installed: pip install 'dpformer[iceberg]'")
WITHOUT_I3 = Filters(where="item_id <> 'i3'")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.csv")


def rows_of(log: Path) -> Any:
    return duckdb.sql(f"SELECT *, timestamp % 3 AS part FROM read_csv('{log}')").to_arrow_table()


@pytest.fixture
def delta(log: Path, tmp_path: Path) -> Path:
    """Version 0 has the log, version 1 no item i3 any more."""
    folder = tmp_path / "delta"
    deltalake.write_deltalake(str(folder), rows_of(log), partition_by=["part"])
    deltalake.DeltaTable(str(folder)).delete("item_id = 'i3'")
    return folder


@pytest.fixture
def iceberg(log: Path, tmp_path: Path) -> Any:
    """A table of the catalogue in tmp_path/catalog.db; its first snapshot has the log, the current one no item i3."""
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("mine", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("shop")
    rows = rows_of(log)
    table = catalog.create_table("shop.events", rows.schema)
    table.append(rows)
    table.delete("item_id = 'i3'")
    return table


def named(path: object, *given: Any, **options: Any) -> dict[str, list[str]]:
    """Histories of users who have one: whose rows were deleted is in no table."""
    return {user: items for user, items in read(str(path), *given, **options).named().items() if items}


def test_the_current_state_and_an_earlier_one(log: Path, delta: Path, iceberg: Any) -> None:
    metadata = iceberg.metadata_location.removeprefix("file://")
    first = str(iceberg.snapshots()[0].snapshot_id)
    for path, snapshots in ((delta, ("1", "0")), (metadata, (str(iceberg.current_snapshot().snapshot_id), first))):
        assert named(path) == named(log, filters=WITHOUT_I3)
        assert read(path).facts["snapshot"] == snapshots[0]
        before = Reading(snapshot=snapshots[1])
        assert named(path, reading=before) == named(log)
        assert read(path, reading=before).facts["snapshot"] == snapshots[1]
        query = Reading(query="SELECT * FROM log WHERE item_id <> 'i4'", snapshot=snapshots[1])
        assert named(path, reading=query) == named(log, filters=Filters(where="item_id <> 'i4'"))
        later = Filters(where="CAST(part AS INTEGER) = 1")
        assert named(path, reading=before, filters=later) == named(
            log, filters=Filters(where="CAST(timestamp AS INTEGER) % 3 = 1")
        )


def test_sums_are_those_of_a_file(log: Path, delta: Path, iceberg: Any) -> None:
    sums = []
    for path in (log, delta, iceberg.metadata_location.removeprefix("file://")):
        dataset = prepare(path, filters=WITHOUT_I3)
        with transition_sums(dataset, "numpy") as found:
            sums.append(found.items(dataset.num_items))
    np.testing.assert_array_equal(sums[0], sums[1])
    np.testing.assert_array_equal(sums[0], sums[2])


def test_a_folder_says_itself_which_state_is_current(log: Path, iceberg: Any) -> None:
    metadata = Path(iceberg.metadata_location.removeprefix("file://"))
    folder = metadata.parents[1]
    with pytest.raises(DpformerError, match="does not say which of its states is the current one"):
        read(folder)
    (metadata.parent / "version-hint.text").write_text(metadata.name.removesuffix(".metadata.json"))
    assert named(folder) == named(log, filters=WITHOUT_I3)
    with pytest.raises(DpformerError, match="is part of a table of Apache Iceberg"):
        read(folder / "data")


def test_a_catalogue_is_asked(log: Path, iceberg: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the library reads its configuration once."""
    monkeypatch.setenv("PYICEBERG_CATALOG__MINE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__MINE__TYPE", "sql")
    urls = ("iceberg://mine/shop.events", "iceberg://mine/shop.nothing", "iceberg://other/shop.events")
    found = [command("data", url) for url in urls]
    assert found[0].returncode == 0 and f"{len(named(log)):,} users" in found[0].stdout, found[0].stderr
    assert all(each.returncode == 2 and each.stderr.count("\n") == 1 for each in found[1:]), found[1].stderr
    assert "does not exist" in found[1].stderr and "URI missing" in found[2].stderr


def test_a_deletion_vector_is_heeded(tmp_path: Path) -> None:
    """A table that says which rows of a file are deleted, written by hand as its specification says."""
    bitmap = pytest.importorskip("pyroaring", reason="pyroaring is not installed").BitMap([1, 3]).serialize()
    duckdb.execute(
        "COPY (SELECT 'u' || (r % 2) AS user_id, r AS item_id, r AS timestamp FROM range(5) AS t(r)) "
        f"TO '{tmp_path}/rows.parquet' (FORMAT parquet)"
    )
    deleted = struct.pack("<iqi", 1681511377, 1, 0) + bitmap
    kinds = {"user_id": "string", "item_id": "long", "timestamp": "long"}
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in kinds.items()]
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    table = {
        "id": "0b5d3e84-71ce-4bd6-8bbd-fa6b74ca5a3f",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {},
    }
    file = {
        "path": "rows.parquet",
        "partitionValues": {},
        "size": (tmp_path / "rows.parquet").stat().st_size,
        "modificationTime": 0,
        "dataChange": True,
        "deletionVector": {
            "storageType": "i",
            "pathOrInlineDv": z85(deleted),
            "sizeInBytes": len(deleted),
            "cardinality": 2,
        },
    }
    actions = (
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"metaData": table},
        {"add": file},
    )
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))
    assert read(tmp_path).named() == {"u0": ["0", "2", "4"]}


def z85(data: bytes) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    data += b"\0" * (-len(data) % 4)
    numbers = [int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data), 4)]
    return "".join(digits[number // 85**place % 85] for number in numbers for place in (4, 3, 2, 1, 0))


def test_a_run_stays_with_its_state(delta: Path, log: Path, tmp_path: Path) -> None:
    """Its number is in the owner's record, and nowhere in what is published."""
    run = tmp_path / "run"
    printed("train", delta, "--out", run, "--epsilon", 8, "--model", "counts", "--snapshot", 0)
    recent = tmp_path / "recent"
    assert "snapshot 1" in invoke("train", delta, "--out", recent, "--epsilon", 8, "--model", "counts").output
    asked = ("evaluate", recent, "--json", "--samples", 10)
    before = printed(*asked)
    deltalake.write_deltalake(str(delta), rows_of(log), mode="append")
    assert printed(*asked) == printed(*asked[:2], delta, *asked[2:]) == before
    folder = RunFolder(recent)
    assert folder.read_json(folder.data)["snapshot"] == "1"
    assert "snapshot" not in folder.statement.read_text() and "snapshot =" not in folder.config.read_text()
    for done in (run, recent):
        assert "data and split are the same" in printed("verify", done)
        assert "users" in printed("evaluate", done, "--json", "--samples", 10)
    secret = folder.read_json(folder.data)
    folder.write_json(folder.data, {**secret, "snapshot": "0"})
    found = invoke("verify", recent)
    assert found.exit_code == 1 and "the statement is about other data" in found.output.replace("\n", " ")


def test_what_cannot_be_read_is_one_sentence(delta: Path, iceberg: Any, log: Path, tmp_path: Path) -> None:
    metadata = iceberg.metadata_location.removeprefix("file://")
    for given, sentence in {
        (delta, "--snapshot", "77"): "version 77 of ",
        (delta, "--snapshot", "-1"): "give the version of the Delta table",
        (delta, "--order", "file"): "have no order",
        (delta, "--user-column", "buyer"): "no column 'buyer'",
        (delta, "--format", "csv"): "--format is for files",
        (delta / "part=1",): "part of a table of Delta Lake",
        (metadata, "--snapshot", "5"): "no snapshot 5 (it may have expired)",
        (metadata, "--snapshot", "x"): "give the number of a snapshot",
        (log, "--snapshot", "1"): "--snapshot is for tables with numbered states",
    }.items():
        assert sentence in refused("data", *given), given
    next(delta.rglob("*.parquet")).unlink()
    for file in delta.rglob("*.parquet"):
        file.unlink()
    assert "cannot be read" in refused("train", delta, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("days", [("1",), ("1", "2")])
def test_folders_of_hive_are_columns(log: Path, tmp_path: Path, days: tuple[str, ...]) -> None:
    """Of one folder as of many: which there are does not decide what a column is."""
    for day in days:
        folder = tmp_path / "events" / f"day={day}" / "country=NL"
        folder.mkdir(parents=True)
        rows = f"SELECT * FROM read_csv('{log}') WHERE hash(item_id) % {len(days)} = {int(day) - 1}"
        duckdb.execute(f"COPY ({rows}) TO '{folder}/rows.parquet' (FORMAT parquet)")
    kept = read(tmp_path / "events", filters=Filters(where="day = '1' AND country = 'NL'")).named()
    assert sum(map(len, kept.values())) > 0
    assert (kept == read(log).named()) == (len(days) == 1)
