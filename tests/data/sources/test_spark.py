"""A log in a cluster: Spark's local mode reads, encodes, splits and adds up what DuckDB and NumPy do."""

import io
import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from dpformer.data import Columns, Dataset, Filters, Reading, prepare, read_catalog
from dpformer.data.shared_store import Store
from dpformer.data.sources.spark import cluster_log, handed_over
from dpformer.engines.spark_sums import spark_sums
from dpformer.errors import DpformerError
from dpformer.noise import SecureRandom
from dpformer.queries.transitions.backend import transition_sums
from dpformer.queries.transitions.rounds import TransitionRelease, release_transition_sums
from dpformer.runs import train
from dpformer.runs.config import Config
from tests.engines.spark import spark  # noqa: F401
from tests.tiny_runs import printed, refused

SQL = """
    SELECT 'u' || (h % 300) AS user_id, (hash(r * 7) % 40) AS item_id, TIMESTAMP '2024-01-01' + to_seconds(r * 37)
    AS created_at, (h % 5) + 1 AS rating FROM (SELECT range AS r, hash(range) AS h FROM range(6000))
"""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory, spark: Any) -> Path:  # noqa: F811
    """A folder of four Parquet files; also the table `events`."""
    folder = tmp_path_factory.mktemp("events")
    for part in range(4):
        query = f"SELECT * FROM ({SQL}) WHERE hash(created_at) % 4 = {part}"
        duckdb.execute(f"COPY ({query}) TO '{folder}/{part}.parquet' (FORMAT parquet)")
    spark.read.parquet(str(folder)).createOrReplaceTempView("events")
    return folder


def stored(release: TransitionRelease) -> bytes:
    """Every released number."""
    file = io.BytesIO()
    parts = (
        release.items,
        release.pairs,
        release.total,
        release.difference,
        release.item_list,
        release.frequencies.counts,
    )
    for part in parts:
        np.save(file, part)
    return file.getvalue()


@pytest.mark.parametrize("options", [{}, {"max_length": 7, "validation": True, "filters": Filters(2.0, 3)}], ids=str)
def test_the_whole_release_is_the_same_bytes_from_every_engine(events: Path, options: dict[str, Any]) -> None:
    options = {"max_length": None, **options}
    log = cluster_log(events, columns=Columns(), reading=Reading(), **options)
    dataset: Dataset = prepare(events, **options)
    assert (log.num_users, log.num_items) == (dataset.num_users, dataset.num_items)
    assert list(log.vocabulary.ids) == list(dataset.vocabulary.ids)
    random = SecureRandom("test")
    released = []
    for source, engine in ((log, "spark"), (dataset, "duckdb"), (dataset, "numpy")):
        key = SecureRandom("test").with_state(random.state_dict())
        with transition_sums(source, engine) as sums:
            released.append(stored(release_transition_sums(sums, log.num_items, 2.0, delta=1e-5, random=key)))
    assert released[0] == released[1] == released[2]


def test_a_table_trains_with_one_command(events: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    text = printed("train", "--engine", "spark", "--table", "events", "--out", out, "--epsilon", 8)
    assert "ε = 8" in text
    facts = (out / "privacy.json").read_text()
    assert "released from the data with differential privacy" in facts and "N = 300" in facts
    assert "in a cluster" in refused("evaluate", out)
    assert "users" in printed("evaluate", out, events, "--json", "--samples", 10)
    assert "in a cluster" not in printed("verify", out)


def test_one_seed_gives_the_same_bytes_from_every_engine(events: Path, tmp_path: Path) -> None:
    """Through the command line, noise and all: its address must not depend on the order of users."""
    models = []
    for engine in ("spark", "duckdb", "numpy"):
        out = tmp_path / engine
        options = ("--engine", engine, "--model", "counts", "--seed", 1, "--epsilon", 8)
        assert "at org.apache" not in printed("train", events, *options, "--out", out)
        models.append((out / "model.safetensors").read_bytes())
    assert models[0] == models[1] == models[2]


def test_a_catalogue_filters_and_bad_rows(events: Path, tmp_path: Path, spark: Any) -> None:  # noqa: F811
    names = tmp_path / "items.csv"
    names.write_text("item_id\n" + "".join(f"{item}\n" for item in range(30)))
    catalog = read_catalog(names)
    declared = {"columns": Columns(), "reading": Reading(table="events"), "vocabulary": catalog}
    with pytest.raises(DpformerError, match="not in the catalogue"):
        cluster_log(None, **declared)
    log = cluster_log(None, **declared, drop_unknown_items=True)
    dataset = prepare(events, vocabulary=catalog, drop_unknown_items=True, max_length=None)
    np.testing.assert_array_equal(
        log.sums().items(30), _items(dataset), err_msg="what is dropped is dropped before the split"
    )
    query = "SELECT *, CASE WHEN rating = 5 THEN NULL ELSE user_id END AS who FROM events"
    columns = Columns(user="who")
    with pytest.raises(DpformerError, match="have no user: complete them, or skip such rows with --skip-bad-rows"):
        cluster_log(None, columns=columns, reading=Reading(query=query))
    skipping = cluster_log(None, columns=columns, reading=Reading(query=query, skip_bad_rows=True))
    assert skipping.description["skipped"]["no user"] > 0


def _items(dataset: Dataset) -> np.ndarray:
    with transition_sums(dataset, "numpy") as sums:
        return sums.items(dataset.num_items)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        (
            "SELECT CAST(user_id AS BINARY) AS user_id, item_id, created_at FROM events",
            "'user_id' is binary; cast it to text",
        ),
        (
            "SELECT user_id, item_id, CAST(created_at AS STRING) AS created_at FROM events",
            "'created_at' is string; cast it to one of",
        ),
        ("SELECT user_id, item_id FROM events", "no timestamp column"),
        ("SELECT nothing FROM events", "Spark cannot read the log"),
        ("DROP VIEW events", "Spark cannot read the log"),
        ("WITH x AS (SELECT 1) INSERT INTO events SELECT * FROM x", "Spark cannot read the log"),
        ("SELECT user_id, item_id, created_at FROM events WHERE rating > 9", "has no rows"),
        ("SELECT user_id, item_id, created_at FROM events WHERE user_id = 'u7'", "only 1 user remains"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(events: Path, query: str, sentence: str) -> None:
    with pytest.raises(DpformerError, match=sentence):
        cluster_log(None, columns=Columns(), reading=Reading(query=query))


def test_a_run_that_died_releases_the_same_again(events: Path, tmp_path: Path) -> None:
    """The data's hash is a function of the data, whatever order its rows come in."""
    hashes = {
        cluster_log(None, columns=Columns(), reading=Reading(query=f"SELECT * FROM events ORDER BY {by}")).hash
        for by in ("created_at", "rating, user_id")
    }
    other = "SELECT * FROM events WHERE created_at > '2024-01-01 00:00:00'"
    assert len(hashes) == 1
    assert cluster_log(None, columns=Columns(), reading=Reading(query=other)).hash not in hashes
    config = Config.make(engine="spark", table="events", seed=3)
    models = [(train(config, tmp_path / name).folder / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert models[0] == models[1]


def test_a_worker_that_fails_is_one_sentence(spark: Any) -> None:  # noqa: F811
    with pytest.raises(DpformerError, match=r"^Spark cannot count: ValueError: items must be in 0\.\.2, not 0\.\.5$"):
        spark_sums(spark, np.array([0, 5]), np.array([0]), np.array([2])).items(3)


def test_choices_that_need_histories_here_are_refused() -> None:
    for choices in ({"model": "transformer"}, {"private_metrics": True}, {"snapshot": "1"}):
        with pytest.raises(DpformerError, match="--cache"):
            Config.make(engine="spark", table="events", **choices)
    with pytest.raises(DpformerError, match="--table"):
        Config.make(engine="spark")


def test_histories_handed_over_are_those_of_the_log(events: Path, tmp_path: Path) -> None:
    """In an order that does not depend on the cluster, memory-mapped, and found again without it."""
    cache, options = tmp_path / "cache", {"filters": Filters(2.0, 3), "users": 320, "validation": True}
    here = prepare(events, **options)
    found = handed_over(events, cache, columns=Columns(), reading=Reading(), max_length=200, **options)
    assert isinstance(found.items, np.memmap) and found.unordered_hash == here.unordered_hash
    numbers = {name: user for user, name in enumerate(here.user_ids) if here.lengths[user]}
    assert found.num_users == 320 and list(found.user_ids)[: len(numbers)] == sorted(numbers)
    for user, name in enumerate(sorted(numbers)):
        np.testing.assert_array_equal(found.train(user), here.train(numbers[name]))
    store = Store.of(found, found.vocabulary)
    assert store is not None  # what other processes of a team open
    np.testing.assert_array_equal(store.open().train(5), found.train(5))
    query = Reading(query="SELECT * FROM events ORDER BY rating")
    again = handed_over(None, cache, columns=Columns(), reading=query, max_length=200, **options)
    assert again.hash == found.hash and [path.name for path in cache.iterdir()] == [found.hash[:32]]
    pinned = Reading(table="no such table", snapshot=found.hash[:32])
    assert handed_over(None, cache, columns=Columns(), reading=pinned).hash == found.hash
    for snapshot in ("0" * 32, "../" + found.hash[:32]):
        with pytest.raises(DpformerError, match="does not hold the snapshot"):
            handed_over(None, cache, columns=Columns(), reading=Reading(snapshot=snapshot))


def test_a_network_trains_on_a_table_of_a_cluster(events: Path, tmp_path: Path) -> None:
    """Its state is kept for the owner, and `evaluate` reads that one, whatever the table holds by then."""
    out, cache = tmp_path / "run", tmp_path / "cache"
    sizes = ("--blocks", 1, "--dim", 8, "--max-length", 5, "--epochs", 1, "--batch-size", 64)
    chosen = ("--engine", "spark", "--table", "events", "--cache", cache, "--model", "transformer")
    printed("train", *chosen, *sizes, "--out", out, "--assume-items-public")
    (folder,) = cache.iterdir()
    assert json.loads((out / "checkpoint" / "data.json").read_text())["snapshot"] == folder.name
    assert folder.name not in (out / "privacy.json").read_text()
    assert "users" in printed("evaluate", out, "--json", "--samples", 10)
    folder.rename(tmp_path / "gone")
    assert "does not hold the snapshot" in refused("evaluate", out)
