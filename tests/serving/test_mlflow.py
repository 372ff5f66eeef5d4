"""MLflow needs an earlier pyarrow than other extras, so its tests run in an environment of their own beside .venv."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_with_a_real_server() -> None:
    """Every test of with_mlflow.py passes, and none is skipped."""
    own = Path(os.environ.get("DPFORMER_MLFLOW", ROOT / ".venv-mlflow")) / "bin" / "python"
    python = sys.executable if importlib.util.find_spec("mlflow") else str(own)
    if python != sys.executable and not own.exists():
        pytest.skip("MLflow is not installed: scripts/setup mlflow")
    command = [python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/serving/with_mlflow.py"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert found.returncode == 0, found.stdout + found.stderr
    assert "skipped" not in found.stdout
