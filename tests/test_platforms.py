"""The package can be imported and used where Unix modules are missing (Windows, on which nothing else is tested)."""

import subprocess
import sys

WITHOUT_UNIX = """
import os, signal, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
del signal.SIGHUP, os.sysconf, os.O_DIRECTORY
import dpformer.cli, dpformer.recommender, dpformer.runs.run, dpformer.verification.verify
from dpformer.cli.address_space import check_address_space
from dpformer.engines.duckdb_connection import default_memory
from dpformer.progress import peak_memory
from dpformer.runs.signals import stop_requested
check_address_space()
with stop_requested() as stop:
    print(default_memory(), peak_memory(), stop.is_set())
"""


def test_without_the_modules_of_unix() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_UNIX], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == ["3814MiB", "0", "False"]
