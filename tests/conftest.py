"""Shared by all tests: one torch thread (many small problems), and the folder of real data, if there is one.

A test says the same on every machine, in any order. So random numbers start from one seed before each of them, and
examples of hypothesis are the same each time, without a limit on their time:

    pytest --hypothesis-profile=search      other examples each time

At the end the reasons of all skips are listed (tests/skips.py).
"""

import os
import random
import tempfile
from pathlib import Path

# Some virtual machines announce AMX and fault on it: oneDNN's bfloat16 kernels would end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.skips import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401

torch.set_num_threads(1)
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="dpformer-tests-")  # the secret of the owner of the run folders

# The first says something about the machine; fixtures that all examples share are files and models, which none changes.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=UNCHECKED)
settings.register_profile("search", deadline=None, suppress_health_check=UNCHECKED)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before the fixtures, too: what a test draws does not depend on which tests came before it."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder named by DPFORMER_DATA; tests that need it skip where it is not set."""
    folder = os.environ.get("DPFORMER_DATA")
    if not folder:
        pytest.skip("DPFORMER_DATA is not set: real data sets are not here")
    return Path(folder)


@pytest.fixture
def noise_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that depends on key and step alone.

    Otherwise it depends on every bit of the sum, so two loops whose sums round differently have nothing in common.
    """
    from dpformer.training.optimizer import PrivateOptimizer

    monkeypatch.setattr(PrivateOptimizer, "_address", lambda self, *_: self._random)
