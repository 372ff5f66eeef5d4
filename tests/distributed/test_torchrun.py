"""The documented command, as it stands: torchrun starts the job again after a kill -9, and it resumes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.conftest import Alone, config_of
from tests.distributed.test_distributed import LONG, assert_same, metrics


def children_of(parent: int) -> list[int]:
    """The processes that a process has started, oldest first."""
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_torchrun_restarts_and_it_resumes(log: Path, alone: Alone, tmp_path: Path) -> None:
    config = config_of(log, **LONG)
    expected = alone(config)
    (tmp_path / "config.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", "-m", "dpformer", "train"]
    job = subprocess.Popen(
        [*command, "--config", str(tmp_path / "config.toml"), "--out", str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        jobs.wait_for_steps(tmp_path / "run", 3, seconds=240)
        os.kill(children_of(job.pid)[-1], signal.SIGKILL)
        said, _ = job.communicate(timeout=300)
    finally:
        job.kill()
    assert job.returncode == 0, said
    assert said.count("privacy.json") == 1, "one process speaks"
    assert_same(tmp_path / "run", expected)
    assert metrics(tmp_path / "run", "step", "users") == metrics(expected, "step", "users")
