"""The documented command, as it stands: torchrun starts the job again after a kill -9, and it resumes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.conftest import Alone, config_of
from tests.distributed.test_distributed import LONG, assert_same, metrics

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


def process_of(job: int, rank: int, but: int = 0, seconds: float = 400) -> int:
    """The pid of a rank of a job of torchrun, once there is one other than `but`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for pid in Path(f"/proc/{job}/task/{job}/children").read_text().split():
            try:
                told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:  # it has ended meanwhile
                continue
            if f"RANK={rank}".encode() in told and int(pid) != but:
                return int(pid)
        time.sleep(0.01)
    raise AssertionError(f"torchrun has not started rank {rank}")


def test_torchrun_restarts_and_it_resumes(log: Path, alone: Alone, tmp_path: Path) -> None:
    """Twice: first a follower is killed, then the leader. The model is the one that nobody disturbed."""
    config = config_of(log, **LONG)
    expected = alone(config)
    (tmp_path / "config.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1", "-m", "dpformer", "train"]
    command += ["--config", str(tmp_path / "config.toml"), "--out", str(tmp_path / "run")]
    with (tmp_path / "said").open("w") as said:
        job = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said)
    try:
        kill_twice(job.pid, tmp_path / "run")
        job.wait(400)
    finally:
        job.terminate()  # its processes end with it
        job.wait(60)
        print(text := (tmp_path / "said").read_text())
    assert job.returncode == 0
    assert text.count("privacy.json") == 1, "one process speaks"
    assert_same(tmp_path / "run", expected)
    assert metrics(tmp_path / "run", "step", "users") == metrics(expected, "step", "users")


def kill_twice(job: int, run: Path) -> None:
    jobs.wait_for_steps(run, 3, seconds=400)
    leader = process_of(job, 0)
    os.kill(process_of(job, 1), signal.SIGKILL)
    leader = process_of(job, 0, but=leader)
    jobs.wait_for_steps(run, len(metrics(run, "step")) + 3, seconds=400)
    os.kill(leader, signal.SIGKILL)
