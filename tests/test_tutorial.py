"""The tutorial notebook runs as it stands, in a real kernel, and what is stored in it is what a notebook shows.

To store its output anew: jupyter execute --inplace docs/guide/tutorial.ipynb
"""

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "docs" / "guide" / "tutorial.ipynb"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[Any]:
    """The forms in which the result of a cell is shown; what was said on the way is not compared."""
    return [sorted(output.data) for output in cell.outputs if output.output_type == "execute_result"]


def columns(cell: Any) -> set[str]:
    """The names of the columns of the tables in its output."""
    html = "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)
    return {part.partition("</th>")[0].rpartition(">")[2] for part in html.split("<th")[1:]} - {""}


def test_every_cell_runs_and_its_stored_output_is_up_to_date(tmp_path: Path) -> None:
    stored, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = code_cells(notebook)
    for before, now in zip(code_cells(stored), cells, strict=True):
        assert kinds(before) == kinds(now), now.source
    assert columns(cells[2]) >= {"user_id", "item_id", "title", "score", "rank"}
    assert columns(cells[4]) >= {"item_id", "title", "similarity", "rank"}
    assert cells[-1].outputs[-1].data["text/plain"].count("'item_id'") >= 2
    assert (tmp_path / "films" / "README.md").is_file()


def test_its_output_is_stored_and_names_no_place() -> None:
    cells = code_cells(nbformat.read(NOTEBOOK, as_version=4))
    assert all(cell.outputs for cell in cells)
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "/tmp" not in text and "/root" not in text and "/home" not in text
