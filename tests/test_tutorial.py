"""The tutorial notebook runs as it stands, cell after cell, and what is stored in it is what a notebook showed.

To store its output anew: jupyter execute --inplace docs/guide/tutorial.ipynb
"""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.memo import accountant_remembers  # noqa: F401

NOTEBOOK = Path(__file__).parents[1] / "docs" / "guide" / "tutorial.ipynb"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def shown(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell; gives the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "uvicorn", "fastapi"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    values = [shown("".join(cell["source"]), names) for cell in code_cells()]
    assert {"score", "rank"} <= set(values[2].columns)
    for value in values:
        if hasattr(value, "_repr_html_"):
            assert "<" in value._repr_html_()
    assert len(values[-1]["recommendations"]) == 2 and (tmp_path / "films" / "README.md").is_file()


def test_its_output_is_stored_and_names_no_place() -> None:
    cells = code_cells()
    assert all(cell["outputs"] for cell in cells)
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "/tmp" not in text and "/root" not in text and "/home" not in text
