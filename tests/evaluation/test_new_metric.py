"""A metric of one's own, all of it in this file: training, evaluation, private release, statement, card and report."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpformer.evaluation.metrics import LIST_METRICS, METRICS, ListMetric, Metric, register
from dpformer.report import write_report
from dpformer.runs import train
from dpformer.verification.verify import verify
from tests.tiny_runs import printed
from tests.training.conftest import tiny_config
from tests.training.logs import write_log


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    """Half of the users count who have the item among the first k, all who have it first."""
    register(
        Metric("lead", "Lead", lambda ranks, k: ((ranks == 1) + (ranks <= k)).double() / 2, tracked=True, released=True)
    )
    register(
        ListMetric(
            "longest",
            "Longest: {value:.0f} users have the same item in a list of {k}.",
            lambda listed, _: float(listed.max()),
        )
    )
    try:
        yield
    finally:
        del METRICS["lead"], LIST_METRICS["longest"]


def test_everything_that_shows_accuracy_knows_it(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", users=200)
    run = train(tiny_config(log, private_metrics=True, evaluate_every=1, epochs=1, seed=None), tmp_path / "run").folder
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("lead@10" in record.get("served", {}) for record in records)
    facts = json.loads((run / "privacy.json").read_text())
    assert 0 <= facts["metrics"]["lead@10"] <= 1 and len(facts["metrics"]["sums"]) == 5
    assert any(
        "Lead@10" in sentence and "all of these numbers may be published" in sentence for sentence in facts["words"]
    )
    assert verify(run).passed
    measured = json.loads(printed("evaluate", run, "--json"))
    assert "lead@10" in measured["metrics"]["model"]["served"] and measured["longest@10"] >= 1
    assert "users have the same item in a list of 10" in " ".join(printed("evaluate", run).split())
    page = write_report(run, out=tmp_path / "report.html").read_text()
    assert "Lead@10" in page and "users have the same item" in page
    assert "lead@10" in Path(printed("card", run).strip()).read_text()


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="a metric 'ndcg' already exists"):
        register(METRICS["ndcg"])


def test_no_other_file_names_a_metric() -> None:
    """Names come from the table: a literal would not change with it."""
    source = Path(__file__).parents[2] / "src" / "dpformer"
    files = [path for pattern in ("*.py", "*.html") for path in source.rglob(pattern) if path.name != "metrics.py"]
    found = [
        str(path)
        for path in files
        if any(f"{name}@10" in path.read_text().lower().replace("(ndcg@10 on the synthetic", "") for name in METRICS)
    ]
    assert files and not found, found
