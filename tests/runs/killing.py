"""Kills a run again and again at random moments, resuming it each time, until it is done.

For a process forked from a server that has imported everything once: a fresh interpreter for each of many kills would
spend its time importing torch.
"""

import random
import shutil
import time
from pathlib import Path

from benchmarks.soak import child, kill_until_done, wait

from dpformer.runs.config import Config
from dpformer.runs.planning import make_plan
from tests.training.memo import remember


def kill(config: Config, whole: Path, broken: Path, kills: int, seed: int) -> None:
    """The run undisturbed in `whole`, and killed in `broken`; the number of kills is left beside it."""
    remember()
    make_plan(config.resolve(users=60, threads=1), 60).epsilon  # noqa: B018  remembered by the children
    began = time.monotonic()
    assert wait(child(config, whole)) == 0
    longest = 0.7 * (time.monotonic() - began)
    killed = 0
    while not killed:  # where the first run was slow for other reasons, the next ones may end before they are killed
        shutil.rmtree(broken, ignore_errors=True)
        killed = kill_until_done(config, broken, kills, longest, random.Random(seed))["kills"]
    broken.with_suffix(".kills").write_text(str(killed))
