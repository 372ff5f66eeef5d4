"""Shared by all tests: one torch thread (many small problems), and the folder of real data, if there is one."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="dpformer-tests-")  # the secret of whoever owns the run folders


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder named by DPFORMER_DATA; tests that need it skip where it is not set."""
    folder = os.environ.get("DPFORMER_DATA")
    if not folder:
        pytest.skip("DPFORMER_DATA is not set: real data sets are not here")
    return Path(folder)
