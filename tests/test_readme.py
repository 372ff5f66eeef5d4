"""The README's examples run as they stand, with the real libraries, and the README names what it must."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.memo import accountant_remembers  # noqa: F401

README = Path(__file__).parent.parent / "README.md"
CHANGELOG = README.with_name("CHANGELOG.md")


def blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found


def test_the_example_runs() -> None:
    for block in blocks("python"):
        exec(compile(block, str(README), "exec"), {})


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow", "duckdb"])
def test_from_a_data_frame_in_five_lines(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line; for other libraries with their own way to read a CSV, and nothing else changed."""
    (tmp_path / "films.csv").write_text("item_id,title\n" + "".join(f"{n},Film {n}\n" for n in range(1, 40)))
    rows = [f"{user},{1 + (user + step) % 39},{step}" for user in range(80) for step in range(6)]
    (tmp_path / "ml-1m.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    monkeypatch.chdir(tmp_path)
    lines = [line.removeprefix(">>> ") for line in blocks("pycon")[0].splitlines() if line.startswith(">>> ")]
    assert len(lines) == 5, "import, make, fit, recommend, state"
    readers = {
        "pandas": ("import pandas as pd", "pd.read_csv"),
        "polars": ("import polars as pl", "pl.read_csv"),
        "pyarrow": ("import pyarrow.csv", "pyarrow.csv.read_csv"),
        "duckdb": ("import duckdb", "duckdb.read_csv"),
    }
    names: dict[str, Any] = {}
    for line in lines[:3]:
        own = line.replace("import pandas as pd", readers[library][0]).replace("pd.read_csv", readers[library][1])
        exec(own, names)
    found = eval(lines[3], names)
    shown = blocks("pycon")[0].splitlines()[4].split()  # the header of the frame
    assert list(getattr(found, "column_names", None) or found.columns) == shown
    assert len(found["rank"]) == 3
    kind = type(found).__module__.partition(".")[0].lstrip("_")
    assert kind == {"duckdb": "pyarrow"}.get(library, library), "of histories in a dict, the library that was fitted"
    assert "User-level differential privacy" in repr(eval(lines[4], names))


def test_it_is_short_and_begins_with_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    opening = "\n".join(text.splitlines()[:20])
    assert "scripts/demo" in opening and "scripts/test" in opening


def test_links_lead_somewhere() -> None:
    for page in (README, README.with_name("CONTRIBUTING.md"), README.with_name("SECURITY.md"), CHANGELOG):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert "://" in link or (README.parent / link).exists(), (page.name, link)


def test_the_changelog_is_one_line_per_change() -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    lines = text[text.index("\n## ") :].splitlines()
    assert lines and all(line.startswith(("- ", "#")) or not line for line in lines)
    assert max(map(len, lines)) <= 160
