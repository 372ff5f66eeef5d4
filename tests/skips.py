"""The reasons of all skips, listed at the end.

In CI (`CI=true`) a skip for want of a library or server that CI installs is a failure: a test that never runs guards
nothing.
"""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

# Libraries, servers and programs that CI installs, as the reason of a skip names them.
INSTALLED_IN_CI = (
    "pandas", "polars", "pyarrow", "IPython", "nbclient", "ipykernel", "pyspark", "Java", "jsonschema", "Chromium",
    "playwright", "obstore", "moto", "adbc", "pymysql", "PostgreSQL", "MariaDB", "huggingface_hub", "deltalake",
    "pyiceberg", "pyroaring", "compiler", "setuptools", "uvicorn", "transformers", "onnxruntime", "lightning",
    "MLflow", "pgvector", "tensorboard",
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
