"""How many histories a second a released model ranks, in processor time: python -m benchmarks.batch RUN."""

from __future__ import annotations

import sys
import tempfile
import time
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
    began = time.process_time()
    ranker.top(codes.astype(np.int64), offsets, K)
    ranked = time.process_time() - began
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        write_recommendations(ranker, histories, Path(folder) / "recs.parquet", k=K)
        written = time.process_time() - began
    print(f"{len(names):,} items, {USERS:,} histories of {LENGTH}; a second of one core:")
    print(f"ranked {USERS / ranked:,.0f}; ranked and written as Parquet with titles {USERS / written:,.0f}")


if __name__ == "__main__":
    main()
