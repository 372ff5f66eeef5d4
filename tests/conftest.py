"""Shared by all tests: one torch thread (many small problems), and the folder of real data, if there is one.

A test says the same on every machine, in any order. So random numbers start from one seed before each of them, and
examples of hypothesis are the same each time, without a limit on their time:

    pytest --hypothesis-profile=search      other examples each time

At the end the reasons of all skips are listed. In CI (`CI=true`) a skip for want of a library or server that CI
installs is a failure: a test that never runs guards nothing.
"""

import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Some virtual machines announce AMX and fault on it: oneDNN's bfloat16 kernels would end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

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


# Libraries, servers and programs that CI installs, as the reason of a skip names them.
INSTALLED_IN_CI = (
    "pandas", "polars", "pyarrow", "IPython", "nbclient", "ipykernel", "pyspark", "Java", "jsonschema", "Chromium",
    "playwright", "obstore", "moto", "adbc", "pymysql", "PostgreSQL", "MariaDB", "huggingface_hub", "deltalake",
    "pyiceberg", "pyroaring", "compiler", "setuptools", "uvicorn", "transformers", "onnxruntime", "lightning",
)  # fmt: skip


def skip_reasons(reporter: Any) -> Counter[str]:
    """Reason → how many tests it skipped."""
    skipped = [report.longrepr for report in reporter.stats.get("skipped", [])]
    return Counter(str(found[2] if isinstance(found, tuple) else found).removeprefix("Skipped: ") for found in skipped)


def missing_in_ci(reasons: Iterable[str]) -> list[str]:
    """The reasons that name something CI should have installed."""
    return [reason for reason in reasons if any(name.lower() in reason.lower() for name in INSTALLED_IN_CI)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CI") != "true" or hasattr(session.config, "workerinput"):
        return
    if missing_in_ci(skip_reasons(reporter)) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = skip_reasons(terminalreporter)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    if os.environ.get("CI") == "true" and (missing := missing_in_ci(reasons)):
        terminalreporter.write_line(f"FAILED: CI must install what these tests need: {'; '.join(missing)}", red=True)


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
