"""`dp.Recommender` and `dp.LanguageModel`: frames of every library, the same model as the command line, one budget."""

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpformer as dp
from dpformer.errors import DpformerError
from dpformer.runs import Config, train
from tests.tiny_runs import printed, write_catalog
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401

ROWS: dict[str, list[Any]] = {
    "user_id": [u for u in range(60) for _ in range(5)],
    "item_id": [(u + t) % 12 for u in range(60) for t in range(5)],
    "timestamp": [t for _ in range(60) for t in range(5)],
}
ITEMS = {"item_id": list(range(12)), "title": [f"Film {item}" for item in range(12)]}


def frame(kind: str, columns: dict[str, list[Any]]) -> Any:
    if kind == "duckdb":
        pytest.importorskip("pyarrow")
        import duckdb

        return duckdb.from_arrow(frame("pyarrow", columns))
    library = pytest.importorskip(kind)
    return library.table(columns) if kind == "pyarrow" else library.DataFrame(columns)


def columns_of(table: Any) -> dict[str, list[Any]]:
    if hasattr(table, "fetchall"):
        table = table.arrow()
        table = table.read_all() if hasattr(table, "read_all") else table
    if hasattr(table, "to_pydict"):
        return dict(table.to_pydict())
    return {name: list(table[name]) for name in table.columns}


@pytest.fixture(scope="module")
def fitted() -> dp.Recommender:
    pytest.importorskip("pandas")
    rec = dp.Recommender(epsilon=50, private_metrics=True)
    return rec.fit(frame("pandas", ROWS), items=frame("pandas", ITEMS))


def test_a_plan_touches_no_data() -> None:
    plan = dp.Recommender(epsilon=5).plan(users=6040)
    assert plan["users"] == 6040 and plan["epsilon"] <= 5 and plan["notes"] == []
    assert "for transition counts" in plan._repr_html_() and "time, memory" in plan._repr_html_()
    assert "above 1 / (10" in dp.Recommender(epsilon=5, delta=1e-4).plan(users=6040)._repr_html_()
    assert "above 1 / 6,040 users" in dp.Recommender(epsilon=5, delta=1e-3).plan(users=6040)["notes"][0]
    network = dp.Recommender(epsilon=5, model="transformer", epochs=1, max_length=8).plan(users=100, items=20)
    assert network["estimate"]["memory"] > 0 and "GiB" in network._repr_html_()


NAMES = {"pandas": "DataFrame (pandas)", "polars": "DataFrame (polars)", "pyarrow": "Table (pyarrow)"}


@pytest.mark.parametrize("kind", ["pandas", "polars", "pyarrow", "duckdb"])
def test_frames_of_every_library(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The same kind comes out, with ids of the type that went in; a seed makes the same model of each."""
    given = frame(kind, ROWS)
    rec = dp.Recommender(epsilon=50, seed=3).fit(given, items=frame(kind, ITEMS))
    said = capfd.readouterr().err
    assert "frame.parquet" not in said, "the user gave no such file"
    assert f"{NAMES.get(kind, 'DuckDBPyRelation (duckdb)')}: histories are ordered by timestamp" in said
    found = rec.recommend(given, k=3)
    assert type(found) is type(given)
    table = columns_of(found)
    assert list(table) == ["user_id", "item_id", "title", "score", "rank"] and len(table["rank"]) == 180
    assert table["user_id"][0] == 0 and isinstance(int(table["item_id"][0]), int) and table["rank"][:3] == [1, 2, 3]
    reference = dp.Recommender(epsilon=50, seed=3).fit(frame("pandas", ROWS), items=frame("pandas", ITEMS))
    np.testing.assert_array_equal(table["item_id"], list(reference.recommend(frame("pandas", ROWS), k=3)["item_id"]))


def test_the_same_model_as_the_command_line(tmp_path: Path) -> None:
    log, items = write_log(tmp_path / "log.csv"), write_catalog(tmp_path / "items.csv")
    by_command = train(Config.make(file=log, catalog=items, epsilon=8.0, seed=5, threads=1), tmp_path / "a")
    rec = dp.Recommender(epsilon=8.0, seed=5, threads=1).fit(log, items, out=tmp_path / "b")
    one, other = by_command.release.model.state_dict(), rec.release.model.state_dict()
    assert all(bool((one[name] == other[name]).all()) for name in one)
    assert printed("recommend", tmp_path / "b", "--history", "i1", "--json")


def test_recommend_similar_explain(fitted: dp.Recommender) -> None:
    with pytest.warns(UserWarning, match="1 of 3 interactions were ignored"):
        table = fitted.recommend({"ann": [3, 4, "never"], "bob": []}, k=2)
    assert list(table["user_id"]) == ["ann", "ann", "bob", "bob"] and list(table["rank"]) == [1, 2, 1, 2]
    assert {"3", "4"}.isdisjoint(table["item_id"][:2])
    seen = fitted.recommend({"ann": [3]}, k=12, filter_seen=False)
    assert len(seen) == 12
    assert all(0 < value <= 1.0001 for value in fitted.similar(3, k=4)["similarity"])
    why = fitted.explain([3, 4], 5)
    assert sum(row["contribution"] for row in why) == pytest.approx(1) and "<table>" in why._repr_html_()
    with pytest.raises(DpformerError, match="not among the 12 items"):
        fitted.similar("nothing")


def test_accuracy_with_noise_or_said_to_be_not_covered(fitted: dp.Recommender) -> None:
    noisy = fitted.evaluate()
    assert "deviation" in noisy and "covered by ε" in noisy._repr_html_()
    exact = fitted.evaluate(exact=True)
    assert exact["covered"] is False and exact["users"] == 60
    assert "not covered" in exact._repr_html_() and "ndcg@10" in exact._repr_html_()
    assert fitted.evaluate(frame("pandas", ROWS), exact=True)["users"] == 60
    with pytest.raises(DpformerError, match="no budget for noisy metrics"):
        fitted.evaluate(frame("pandas", ROWS))


def test_a_second_fit_is_refused_or_counted(tmp_path: Path) -> None:
    log, items = write_log(tmp_path / "log.csv"), write_catalog(tmp_path / "items.csv")
    rec = dp.Recommender(epsilon=4.0).fit(log, items)
    with pytest.raises(DpformerError, match="already fitted"):
        rec.fit(log, items)
    ledger = dp.Ledger()
    rec = dp.Recommender(epsilon=4.0, ledger=ledger)
    one = rec.fit(log, items).statement
    before = ledger.epsilon(one["delta"])
    assert before == pytest.approx(one["epsilon"], rel=1e-6)
    rec.fit(log, items)
    assert 1.3 * before < ledger.epsilon(one["delta"]) < 2 * before


def test_a_run_of_a_plan_takes_its_share(tmp_path: Path) -> None:
    log, items = write_log(tmp_path / "log.csv"), write_catalog(tmp_path / "items.csv")
    printed("ledger", "plan", tmp_path / "weekly.db", "--runs", 4, "--epsilon", 6, "--delta", 1e-3)
    rec = dp.Recommender(epsilon=None, ledger=tmp_path / "weekly.db", model="counts").fit(log, items)
    assert 1.5 < rec.statement["epsilon"] < 6 and rec.statement["delta"] == 1e-3 / 4
    printed("ledger", tmp_path / "unplanned.db", "--epsilon", 6, "--delta", 1e-3)
    with pytest.raises(DpformerError, match="no plan to take a share of"):
        dp.Recommender(epsilon=None, ledger=tmp_path / "unplanned.db", model="counts").fit(log, items)
    with pytest.raises(DpformerError, match="epsilon is a NoneType"):
        dp.Recommender(epsilon=None)


def test_a_budget_in_a_file_refuses_what_is_beyond_it(tmp_path: Path) -> None:
    log, items = write_log(tmp_path / "log.csv"), write_catalog(tmp_path / "items.csv")
    budget = tmp_path / "ledger.json"
    printed("ledger", budget, "--epsilon", "5", "--delta", "1e-3")
    dp.Recommender(epsilon=4.0, delta=1e-3, ledger=budget).fit(log, items)
    with pytest.raises(DpformerError, match="nothing was released"):
        dp.Recommender(epsilon=4.0, delta=1e-3, ledger=str(budget)).fit(log, items, out=tmp_path / "second")
    assert not (tmp_path / "second").exists()
    with pytest.raises(DpformerError, match="cannot be counted"):
        dp.Recommender(epsilon=4.0, seed=1, ledger=dp.Ledger()).fit(log, items)


def test_a_second_model_of_the_same_data_hears_of_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log, items = write_log(tmp_path / "log.csv", seed=77), write_catalog(tmp_path / "items.csv")
    dp.Recommender(epsilon=4.0).fit(log, items)
    assert "used the same data" not in capfd.readouterr().err
    dp.Recommender(epsilon=4.0).fit(log, items)
    assert "an earlier run of this process used the same data" in capfd.readouterr().err


def test_saved_and_loaded(fitted: dp.Recommender, tmp_path: Path) -> None:
    path = fitted.save(tmp_path / "run")
    again = dp.load(path)
    assert isinstance(again, dp.Recommender) and again.statement == fitted.statement
    assert list(again.recommend({"ann": [3]})["item_id"]) == list(fitted.recommend({"ann": [3]})["item_id"])
    assert "Privacy Facts" in fitted.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert escape(again.statement["headline"]) in again._repr_html_()
    assert again.statement["headline"] in repr(again.statement)
    with pytest.raises(DpformerError, match="already exists"):
        fitted.save(path)
    with pytest.raises(DpformerError, match="not a run folder"):
        dp.load(tmp_path)


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(DpformerError, match="not fitted yet"):
        _ = dp.Recommender().statement
    with pytest.raises(DpformerError, match=r"expected a data frame .* got a int"):
        dp.Recommender().fit(3)
    with pytest.raises(DpformerError, match="unknown key"):
        dp.Recommender(epsylon=3).plan(10)
    with pytest.raises(DpformerError, match="unit is 'document'"):
        dp.LanguageModel().fit({"ann": ["a text"]})


def test_a_language_model(tmp_path: Path) -> None:
    texts = [f"to be or not to be, {number}" for number in range(80)]
    tiny: dict[str, Any] = {"dim": 8, "blocks": 1, "epochs": 1, "batch_size": 20, "max_length": 16, "threads": 1}
    model = dp.LanguageModel(epsilon=8, **tiny).fit(texts)
    assert model.statement["unit"] == "document" and len(model.generate("to", 5, seed=1)) == 5
    assert model.evaluate(exact=True)["covered"] is False
    loaded = dp.load(model.save(tmp_path / "lm"))
    assert isinstance(loaded, dp.LanguageModel) and loaded.generate("to", 5, seed=1) == model.generate("to", 5, seed=1)
