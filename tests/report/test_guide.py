"""The Python in docs/guide/use.md and serving.md runs as it stands, on a run called runs/mine."""

import re
import shutil
from pathlib import Path

import pytest

from tests.tiny_runs import tiny_run

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "use.md"
SERVING = GUIDE.with_name("serving.md")


def test_examples_run(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_run(tmp_path_factory), tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    for needed in ("pandas", "fastapi", "prometheus_client"):
        pytest.importorskip(needed)
    text = GUIDE.read_text(encoding="utf-8") + SERVING.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    elsewhere = "import mlflow", "'items.parquet'"  # tests/serving/test_mlflow.py, tests/export/test_pgvector.py
    blocks = [block for block in blocks if not any(words in block for words in elsewhere)]
    for block in blocks:
        exec(compile(block, GUIDE.name, "exec"), names)
    assert len(blocks) == 5 and Path("model.onnx").exists() and Path("runs/mine/report.html").exists()


def test_links_lead_somewhere() -> None:
    for page in (GUIDE, SERVING):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).exists(), link
