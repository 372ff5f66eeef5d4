"""Kills a run again and again at random moments, resuming it each time, until it is done. Run as a program.

It imports everything once and forks: a fresh interpreter for each of many kills would spend its time importing torch.
"""

import random
import sys
import time
from pathlib import Path

from benchmarks.soak import child, kill_until_done, wait

from dpformer.runs.config import Config
from dpformer.runs.planning import make_plan
from tests.training.memo import remember

if __name__ == "__main__":
    given, whole, broken, kills, seed = sys.argv[1:]
    config = Config.make(Path(given))
    remember()
    make_plan(config.resolve(users=60, threads=1), 60).epsilon  # noqa: B018  remembered by the children
    began = time.monotonic()
    assert wait(child(config, Path(whole))) == 0
    longest = 0.7 * (time.monotonic() - began)
    print(kill_until_done(config, Path(broken), int(kills), longest, random.Random(int(seed)))["kills"])
