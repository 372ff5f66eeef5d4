"""How many histories a second a released model ranks, and writes as Parquet: python -m benchmarks.batch RUN.

By the clock on all cores of this process, and in processor time, which does not depend on what else the machine does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dpformer.data.histories import Histories
from dpformer.runs.model_file import load_release, model_file
from dpformer.serving.batch import write_recommendations
from dpformer.serving.ranking import Ranker

USERS, LENGTH, K = 20_000, 50, 10


def main() -> None:
    torch.set_num_threads(1)
    release = load_release(model_file(sys.argv[1]))
    ranker, random = Ranker(release), np.random.default_rng(0)
    assert release.frequencies is not None
    shares = release.frequencies / release.frequencies.sum()
    codes = random.choice(len(shares), size=USERS * LENGTH, p=shares).astype(np.int32)
    offsets = np.arange(USERS + 1) * LENGTH
    names = [str(name) for name in release.vocabulary]
    histories = Histories([f"u{user}" for user in range(USERS)], names, codes, offsets)
    print(f"{len(names):,} items, {USERS:,} histories of {LENGTH}, {len(os.sched_getaffinity(0))} cores")
    show("ranked", lambda: ranker.top(codes.astype(np.int64), offsets, K))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recs.parquet"
        show("ranked and written as Parquet", lambda: write_recommendations(ranker, histories, path, k=K))


def show(what: str, work: Callable[[], object]) -> None:
    """The best of three, since the first also warms up."""
    clock, processor = [], []
    for _ in range(3):
        began, spent = time.perf_counter(), time.process_time()
        work()
        clock.append(time.perf_counter() - began)
        processor.append(time.process_time() - spent)
    print(f"{what}: {USERS / min(clock):,.0f} a second by the clock, {USERS / min(processor):,.0f} a processor second")


if __name__ == "__main__":
    main()
