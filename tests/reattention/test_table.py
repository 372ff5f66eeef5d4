"""`dpformer moments` prints the paper's table."""

import json

import pytest
import typer
from typer.testing import CliRunner

from dpformer.cli.moments import moments

app = typer.Typer()
app.command()(moments)


def test_the_table_agrees_with_sampling_and_with_the_paper() -> None:
    result = CliRunner().invoke(app, ["--samples", "300000", "--json"])
    rows = {row["deviation"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == [0.01, 0.1, 1.0]
    for row in rows.values():
        assert row["relu_exact"] == pytest.approx(row["relu_sampled"], rel=0.02)
        assert row["gelu_exact"] == pytest.approx(row["gelu_sampled"], rel=0.02)
        assert row["gelu_paper"] == row["relu_exact"]
    assert rows[0.01]["gelu_paper"] / rows[0.01]["gelu_exact"] == pytest.approx(1.36, abs=0.01)
    assert rows[1.0]["relu_exact"] == pytest.approx(0.3408, abs=1e-4)


def test_it_is_readable_and_bad_input_is_named() -> None:
    assert "GELU, exact" in CliRunner().invoke(app, ["--samples", "1000"]).stdout
    assert "samples is 1" in str(CliRunner().invoke(app, ["--samples", "1"]).exception)
