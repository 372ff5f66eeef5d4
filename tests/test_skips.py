"""Skips are reported, and in CI a skip for want of something CI installs fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import missing_in_ci

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("reason", "counts"),
    [
        ("could not import 'pandas': No module named 'pandas'", True),
        ("there is no Java: apt-get install default-jre-headless", True),
        ("no Chromium is installed: apt-get install chromium", True),
        ("root may write anywhere", False),
        ("DPFORMER_DATA is not set: real data sets are not here", False),
    ],
)
def test_which_skips_count(reason: str, counts: bool) -> None:
    assert bool(missing_in_ci([reason])) == counts


@pytest.mark.parametrize(("ci", "processes", "code"), [("true", "0", 1), ("true", "1", 1), ("", "0", 0)])
def test_a_missing_library_fails_ci_and_nothing_else(tmp_path: Path, ci: str, processes: str, code: int) -> None:
    (tmp_path / "conftest.py").write_text("from tests.skips import *\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_it(): pytest.skip('no Chromium')\ndef test_other(): pass\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", processes, "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
    )
    assert found.returncode == code, found.stdout + found.stderr
    assert "skipped 1: no Chromium" in found.stdout
    assert ("CI must install" in found.stdout) == bool(code)
