"""The engine is small enough to be read."""

from pathlib import Path

import dpformer.clipping

FOLDER = Path(dpformer.clipping.__file__).parent


def test_the_engine_has_at_most_30_files() -> None:
    files = list(FOLDER.rglob("*.py"))
    assert len(files) <= 30
    assert max(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 500
