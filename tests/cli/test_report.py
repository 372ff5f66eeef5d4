"""`dpformer report`, also as a program: a sentence on stderr, exit code 2."""

from pathlib import Path

import pytest

from tests.commands import command
from tests.tiny_runs import copied, printed, refused, tiny_run


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory)


def test_it_writes_the_page_and_says_where(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    path = Path(printed("report", folder).strip())
    assert path == folder / "report.html" and "Privacy Facts" in path.read_text()
    public = Path(printed("report", folder, "--public", "--out", tmp_path / "p.html", "--history", "i1,i2").strip())
    assert "Training loss" not in public.read_text() and "given by the author" in public.read_text()
    assert "Floating point" in public.read_text() and "Title 2" in public.read_text()
    (tmp_path / "titles.csv").write_text("item_id,title\ni1,Another title of one\n")
    named = printed("report", folder, "--public", "--catalog", tmp_path / "titles.csv", "--history", "i1,i2").strip()
    assert "Another title of one" in Path(named).read_text() and "Title 2" not in Path(named).read_text()


def test_bad_input_is_one_sentence(run: Path, tmp_path: Path) -> None:
    assert "not a run folder" in refused("report", tmp_path)
    assert "cannot be written" in refused("report", run, "--out", tmp_path / "nowhere" / "page.html")
    assert "'zzz'" in refused("report", run, "--out", tmp_path / "page.html", "--history", "zzz")
    assert not list(tmp_path.iterdir())


def test_as_a_program(tmp_path: Path) -> None:
    done = command("report", "nowhere", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("dpformer: nowhere") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
