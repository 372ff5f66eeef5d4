"""Commands read a log as training read its own; options and another format override that."""

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dpformer.errors import DpformerError
from dpformer.runs import Config, train
from dpformer.runs.folder import RunFolder
from dpformer.runs.trust import followed
from tests.tiny_runs import invoke, printed, refused
from tests.training.memo import accountant_remembers  # noqa: F401


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a log that needs every kind of option: no header, semicolons, own names, ratings to filter by."""
    folder = tmp_path_factory.mktemp("shop")
    rows = [f"{day};p{(user + day) % 12};{5 - day % 2};u{user}" for user in range(60) for day in range(6)]
    (folder / "sales.csv").write_text("\n".join(rows) + "\n")
    config = Config.make(
        file=folder / "sales.csv",
        columns="day,part,stars,buyer",
        delimiter=";",
        user_column="buyer",
        item_column="part",
        timestamp_column="day",
        rating_column="stars",
        min_rating=5.0,
        min_user_actions=3,
        epsilon=50.0,
        seed=1,
        assume_items_public=True,
    )
    return train(config, folder / "run").folder


def recommended(*arguments: Any) -> dict[str, list[str]]:
    lines = [json.loads(line) for line in printed("recommend", *arguments, "--json", "-k", 12).splitlines()]
    return {line["user_id"]: [found["item_id"] for found in line["recommendations"]] for line in lines}


def test_the_log_of_training_is_read_as_in_training(shop: Path) -> None:
    found = recommended(shop, "--histories", shop.parent / "sales.csv")
    assert len(found) == 60
    assert {"p0", "p2", "p4"}.isdisjoint(found["u0"]), "liked items are the history"
    assert {"p1", "p3", "p5"} <= set(found["u0"]), "and those rated lower are not"


def test_options_override_the_run(shop: Path, tmp_path: Path) -> None:
    log = tmp_path / "new.csv"
    log.write_text("day|part|stars|who\n1|p0|5|ann\n2|p1|2|ann\n")
    options = ("--delimiter", "|", "--columns", "day,part,stars,who", "--user-column", "who", "--skip-bad-rows")
    assert "p1" in recommended(shop, "--histories", log, *options)["ann"]
    assert "p1" not in recommended(shop, "--histories", log, *options, "--unfiltered")["ann"]
    assert "p1" not in recommended(shop, "--histories", log, *options, "--min-rating", "1")["ann"]
    assert "number of fields" in refused("recommend", shop, "--histories", log), "the run's own delimiter"


def test_what_describes_a_format_stays_with_the_format(shop: Path, tmp_path: Path) -> None:
    """A Parquet file has no delimiter and no lacking header; the names of its columns are those of training."""
    with duckdb.connect() as connection:
        select = "SELECT 1 AS day, 'p0' AS part, 5 AS stars, 'ann' AS buyer"
        connection.execute(f"COPY ({select}) TO '{tmp_path / 'new.parquet'}' (FORMAT parquet)")
    assert "p0" not in recommended(shop, "--histories", tmp_path / "new.parquet")["ann"]


def test_too_few_actions_to_train_on_are_enough_to_recommend(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("1;p0;5;ann\n")
    assert "p0" not in recommended(shop, "--histories", tmp_path / "new.csv")["ann"]


def test_evaluate_reads_another_log_as_training_did(shop: Path, tmp_path: Path) -> None:
    log = tmp_path / "new.csv"
    log.write_text("".join(f"{day};p{(user + day) % 12};5;u{user}\n" for user in range(20) for day in range(4)))
    assert json.loads(printed("evaluate", shop, log, "--json", "--samples", 10))["users"] == 20
    log.write_text("".join(f"{day},p{(user + day) % 12},5,u{user}\n" for user in range(10) for day in range(4)))
    assert "has no" in refused("evaluate", shop, log) or "fields" in refused("evaluate", shop, log)
    assert json.loads(printed("evaluate", shop, log, "--delimiter", ",", "--json", "--samples", 10))["users"] == 10


def test_evaluate_reads_its_own_log_otherwise_if_asked(shop: Path) -> None:
    filtered = json.loads(printed("evaluate", shop, "--json", "--samples", 10))
    everything = json.loads(printed("evaluate", shop, "--json", "--samples", 10, "--unfiltered"))
    assert everything["metrics"] != filtered["metrics"]


def test_a_model_file_alone_has_no_settings(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("user_id,item_id,timestamp\nann,p0,1\n")
    assert "p0" not in recommended(shop / "model.safetensors", "--histories", tmp_path / "new.csv")["ann"]


def test_an_option_that_is_none_is_refused_by_name(shop: Path) -> None:
    config = Config.make(shop / "config.toml")
    with pytest.raises(DpformerError, match=r"unknown option 'user_col'.*'user_column'"):
        followed(RunFolder(shop), config, None, user_col="x")
    assert "--user-column" in invoke("recommend", "--help-all").output
    assert "--user-column" in invoke("evaluate", "--help-all").output
