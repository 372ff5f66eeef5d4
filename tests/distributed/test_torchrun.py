"""torchrun starts the job again after a kill -9, and it resumes to the model that nobody disturbed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.distributed import jobs
from tests.distributed.conftest import Alone, config_of
from tests.distributed.test_distributed import LARGE, LONG, assert_same, metrics
from tests.training.memo import _known


def test_processes_find_each_other_again() -> None:
    """Every time: what the dead wrote into torchrun's store does not mislead. Plain torch hangs at the first."""
    assert jobs.finish(jobs.start(1, jobs.under_torchrun, 3, 10, jobs.die_and_come_again, 10)) == [0]


def test_restarted_twice(log: Path, alone: Alone, tmp_path: Path) -> None:
    """First a follower is killed, then the leader."""
    config, run = config_of(log, **LONG), tmp_path / "run"
    expected = alone(config)
    agent = jobs.start(1, jobs.under_torchrun, 2, 2, jobs.train_and_tell, config, run, _known)
    jobs.wait_for_steps(run, 3)
    os.kill(jobs.pid_of(run, restart=0, rank=1), signal.SIGKILL)
    jobs.leave_file(run, 0).touch()
    leader = jobs.pid_of(run, restart=1, rank=0)
    jobs.wait_for_steps(run, 13)  # the first start stayed after 10
    os.kill(leader, signal.SIGKILL)
    jobs.leave_file(run, 1).touch()
    assert jobs.finish(agent) == [0]
    assert jobs.pid_of(run, restart=2, rank=0) != leader
    assert_same(run, expected)
    assert metrics(run, "step", "users") == metrics(expected, "step", "users")


def test_the_documented_command(log: Path, alone: Alone, tmp_path: Path) -> None:
    """torchrun itself, as a user types it. One process speaks, and none is left."""
    config = config_of(log, **LARGE)
    (tmp_path / "config.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "dpformer", "train", "--config", "config.toml", "--out", "run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PET_MASTER_PORT": str(jobs.own_port())}  # torchrun's own is 29500
    job = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("privacy.json") == 1, job.stderr  # twice: it was started again
    assert_same(tmp_path / "run", alone(config))
