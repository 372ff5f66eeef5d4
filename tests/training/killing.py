"""Kills a run again and again at random moments, resuming it each time, until it is done. Run as a program.

It imports everything once and forks: a fresh interpreter for each of many kills would spend its time importing torch.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from dpformer import training
from dpformer.training import run as _imported  # noqa: F401
from dpformer.training.config import Config
from dpformer.training.plan import make_plan
from tests.training.memo import remember


def work(config: Path, out: Path) -> None:
    """What one process does: starts the run, or goes on with it."""
    torch.set_num_threads(1)
    if out.exists():
        training.resume(out)
    else:
        training.train(Config.make(config), out)


def kill_at_random(config: Path, out: Path, kills: int, longest: float, seed: int) -> int:
    """Returns how many processes were killed while they were at work."""
    rng = random.Random(seed)
    killed = 0
    while not (out / "privacy.json").exists():
        child = os.fork()
        if child == 0:
            try:
                work(config, out)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if killed < kills:
            time.sleep(rng.uniform(0, longest))
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGKILL:
            killed += 1
        elif code:
            raise SystemExit(f"a resumed process failed with {code}")
    return killed


if __name__ == "__main__":
    config, whole, broken, kills, seed = sys.argv[1:]
    remember()
    planned = Config.make(Path(config)).resolve(users=60, threads=1)
    make_plan(planned, 60).epsilon  # noqa: B018  remembered by the children: most of the time would go there
    began = time.monotonic()
    work_in = os.fork()
    if work_in == 0:
        work(Path(config), Path(whole))
        os._exit(0)
    assert os.waitpid(work_in, 0)[1] == 0
    took = time.monotonic() - began
    print(kill_at_random(Path(config), Path(broken), int(kills), 0.7 * took, int(seed)))
