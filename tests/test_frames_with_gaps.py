"""Frames as they come: nullable columns, categoricals, missing users and items, filters; with the real libraries."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpformer as dp
from dpformer.data import Columns, Filters, Reading, read
from dpformer.data.sources.frames import store_frame
from dpformer.errors import DpformerError
from dpformer.serving.frames import Frame
from tests.training.memo import accountant_remembers  # noqa: F401

BIG = 2**60 + 1  # not a float
NA = None
USERS: list[Any] = [BIG, BIG, 2, NA, 2, 3]
ITEMS: list[Any] = ["x", "y", "x", "z", NA, "z"]
EVENTS: list[Any] = ["buy", "view", "buy", "buy", "search", NA]
DAYS = ["2024-01-01", "2024-01-02", "2024-01-03", "2024-01-04", "2024-01-05", "2024-01-06"]


def pandas_nullable() -> Any:
    return pd.DataFrame(
        {
            "user_id": pd.array([pd.NA if user is None else user for user in USERS], dtype="Int64"),
            "item_id": pd.array([pd.NA if item is None else item for item in ITEMS], dtype="string"),
            "event": pd.Series(EVENTS, dtype="category"),
            "date": pd.to_datetime(DAYS),
        }
    )


def pandas_objects() -> Any:
    return pd.DataFrame(
        {"user_id": USERS, "item_id": ITEMS, "event": EVENTS, "date": pd.to_datetime(DAYS, utc=True)}, dtype=object
    )


def pandas_categories() -> Any:
    frame = pandas_nullable()
    return frame.assign(item_id=frame.item_id.astype("category"), date=pd.to_datetime(DAYS, utc=True))


def polars() -> Any:
    frame = pl.DataFrame({"user_id": USERS, "item_id": ITEMS, "event": EVENTS, "date": DAYS})
    return frame.with_columns(
        pl.col("date").str.to_datetime(), pl.col("item_id").cast(pl.Categorical), pl.col("event").cast(pl.Categorical)
    )


def arrow() -> Any:
    dates = pa.array(np.array(DAYS, dtype="datetime64[D]"))
    items = pa.array(ITEMS).dictionary_encode()
    return pa.table({"user_id": USERS, "item_id": items, "event": pa.array(EVENTS), "date": dates})


def plain() -> Any:
    return pa.table({"user_id": list(map(str, [BIG, BIG, 2])), "item_id": ["x", "y", "x"], "date": DAYS[:3]})


FRAMES = [pandas_nullable, pandas_objects, pandas_categories, polars, arrow]


def stored(frame: Any, path: Path, filters: Filters | None = None, **reading: Any) -> Any:
    given = Reading(**reading)
    store_frame(Frame(frame).series(), path / "frame.parquet", Columns(), given, filters or Filters())
    return read(path / "frame.parquet", reading=given, filters=filters)


@pytest.mark.parametrize("make", FRAMES)
def test_what_is_missing_is_skipped_and_counted(make: Any, tmp_path: Path) -> None:
    found = stored(make(), tmp_path, skip_bad_rows=True)
    assert found.facts["skipped"] == {"no user": 1, "no item": 1}
    assert found.named() == {str(BIG): ["x", "y"], "2": ["x"], "3": ["z"]}, "to the last digit"


@pytest.mark.parametrize("make", FRAMES)
def test_a_condition_sees_columns_as_they_are(make: Any, tmp_path: Path) -> None:
    bought = stored(make(), tmp_path, Filters(where="event = 'buy' AND user_id IS NOT NULL"))
    assert bought.named() == {str(BIG): ["x"], "2": ["x"], "3": []}
    window = Filters(where="event <> 'search'", since="2024-01-02", until="2024-01-04")
    assert stored(make(), tmp_path, window, skip_bad_rows=True).named() == {str(BIG): ["y"], "2": ["x"], "3": []}


@pytest.mark.parametrize("make", FRAMES)
def test_without_skipping_the_row_is_named(make: Any) -> None:
    rec = dp.Recommender(epsilon=50, seed=1)
    with pytest.raises(DpformerError, match=r"the frame, row 4 has no user_id: .* with skip_bad_rows=True") as caught:
        rec.fit(make())
    assert "--" not in str(caught.value) and "parquet" not in str(caught.value)


def test_rows_that_cannot_be_read_are_skipped_too(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "user_id": ["a", "a", ["b"], "a", "c"],
            "item_id": ["x", " ", "x", "y", "x"],
            "time": ["2024-01-01", "2024-01-02", "2024-01-03", "yesterday", "2024-01-04"],
            "rating": [5, 5, 5, 5, "bad"],
        }
    )
    found = stored(frame, tmp_path, Filters(min_rating=4), skip_bad_rows=True)
    assert found.named() == {"a": ["x"], "c": []}
    assert found.facts["skipped"] == {"no user": 1, "no item": 1, "no time": 1, "no rating": 1}
    for column, says in (("time", "'yesterday' is not a time"), ("rating", "'bad' is not a finite number")):
        whole = frame.drop(index=[1, 2]).assign(**({} if column == "time" else {"time": DAYS[:3]}))
        with pytest.raises(DpformerError, match=says):
            stored(whole, tmp_path, Filters(min_rating=4))


@pytest.mark.parametrize(
    "times",
    [
        [0.1, 0.1 + 1e-12, 0.0],  # finer than a nanosecond: only the order counts
        [1e25, 2e25, -1e25],
        [1.5, 2**53, 0],
        [10**30, 10**30 + 1, 1],
        [1_700_000_000.1, 1_700_000_000.2, 1_600_000_000.0],
        np.array(["3000-01-01T00:00:00.1", "3000-01-01T00:00:00.2", "1900-01-01"], dtype="datetime64[ms]"),
        ["2024-01-01T00:00:00.1", "2024-01-01T00:00:00.2", "2023-01-01"],
        [True + 5, 6.5, 5.5],
    ],
)
def test_the_order_of_times_is_exact(times: list[Any], tmp_path: Path) -> None:
    frame = {"user_id": ["a"] * 3, "item_id": ["y", "z", "x"], "time": times}
    store_frame(frame, tmp_path / "frame.parquet", Columns(), Reading(), Filters())
    assert read(tmp_path / "frame.parquet").named() == {"a": ["x", "y", "z"]}


def test_bounds_on_times_that_are_only_ordered_are_refused(tmp_path: Path) -> None:
    frame = {"user_id": ["a", "a"], "item_id": ["y", "z"], "time": [0.1, 0.1 + 1e-12]}
    with pytest.raises(DpformerError, match="more precise than"):
        store_frame(frame, tmp_path / "frame.parquet", Columns(), Reading(), Filters(since="0"))


def test_a_frame_is_fitted_and_served_by_the_same_filters(tmp_path: Path) -> None:
    rows = [(n, (n + t) % 9, t % 2, t) for n in range(60) for t in range(8)]
    frame = pl.DataFrame(rows, schema=["buyer", "sku", "bought", "at"], orient="row")
    rec = dp.Recommender(epsilon=50, seed=1, where="bought = 1")
    rec.fit(
        frame, items=pl.DataFrame({"item_id": range(9)}), user_column="buyer", item_column="sku", timestamp_column="at"
    )
    served = rec.recommend(frame.filter(pl.col("buyer") == 0), k=9)
    assert isinstance(served, pl.DataFrame) and sorted(served["item_id"]) == [0, 2, 4, 6, 8]
    everything = rec.recommend(frame.filter(pl.col("buyer") == 0), k=9, reading={"unfiltered": True})
    assert list(everything["item_id"]) == [8]
    assert rec.evaluate(frame, exact=True)["users"] == 60
    alone = rec.recommend({7: [0, 1]}, k=2)
    assert isinstance(alone, pl.DataFrame) and alone["user_id"].to_list() == [7, 7]
    alike = rec.similar(1, k=3)
    assert isinstance(alike, pl.DataFrame) and alike.columns == ["item_id", "similarity", "rank"]
    assert alike["item_id"].dtype == alone["item_id"].dtype and rec.similar("1", k=3)["item_id"].dtype == pl.String
    again = dp.load(rec.save(tmp_path / "run"))
    assert sorted(again.recommend(frame.filter(pl.col("buyer") == 0), k=9)["item_id"]) == [0, 2, 4, 6, 8]


def test_wrong_arguments_fail_at_once_and_name_the_right_one() -> None:
    with pytest.raises(DpformerError, match=r"'eps'.* 'epsilon'"):
        dp.Recommender(eps=5)
    with pytest.raises(DpformerError, match=r"epsilon is a DataFrame; give a number.* Recommender\(epsilon=5\)"):
        dp.Recommender(pl.DataFrame({"a": [1]}))  # type: ignore[arg-type]
    with pytest.raises(DpformerError, match="epsilon is a str"):
        dp.Recommender("transformer")  # type: ignore[arg-type]
    with pytest.raises(DpformerError, match="model is '1e-06'"):
        dp.Recommender(5, 1e-6)  # type: ignore[arg-type]
    with pytest.raises(DpformerError, match="contains a subquery"):
        dp.Recommender(where="a = (SELECT 1)")
    with pytest.raises(DpformerError, match="got a int"):
        dp.Recommender(epsilon=50, seed=1).fit(pl.DataFrame({"user_id": [1], "item_id": [1], "ts": [1]}), 7)
    with pytest.raises(DpformerError, match="give its name with user_column="):
        dp.Recommender(epsilon=50, seed=1).fit(pl.DataFrame({"who": [1], "item_id": [1], "ts": [1]}))
