"""The Python in the guide runs."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "data.md"


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"u{user},film-{(3 * user + step) % 30},4,{step}" for user in range(20) for step in range(8)]
    Path("ratings.csv").write_text("\n".join(["user_id,item_id,rating,timestamp", *rows]))
    Path("films.csv").write_text("item_id,title\n" + "".join(f"film-{film},Film {film}\n" for film in range(30)))
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(block, names)
    printed = capsys.readouterr().out
    assert printed.startswith("20 30 160\nFilm 0\nserved {'ndcg@10'")
