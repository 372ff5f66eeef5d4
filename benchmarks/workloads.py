"""The three workloads of the paper, as sequences of users with the real distribution of lengths."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Workload:
    """What a contender trains on: sequences, and the shape of the model."""

    name: str
    items: int
    max_length: int
    dropout: float
    dim: int = 64
    heads: int = 1
    blocks: int = 2
    batch: int = 256  # users of a logical batch in the benchmark
    tokens: int = 8_192  # positions of one of our micro-batches, at most
    physical: int = 32  # users of a physical batch of the others
    made_up: int = 0  # median length of synthetic users; 0: real data, if available

    def sequences(self) -> list[np.ndarray]:
        """A logical batch of users, drawn with a fixed seed from the real data, or made up in its likeness."""
        rng = np.random.default_rng(0)
        users = (None if self.made_up else _real(self)) or _made_up(self, rng)
        chosen = rng.choice(len(users), self.batch, replace=len(users) < self.batch)
        return [users[i][-self.max_length - 1 :] for i in chosen]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("ml-1m", 3_416, 200, 0.2),
        Workload("games", 23_715, 50, 0.5, batch=1024),
        Workload("shakespeare", 65, 256, 0.2, dim=384, heads=6, blocks=6, batch=48, physical=8),
    )
}

_FILES = {"ml-1m": "ml-1m.txt", "games": "amazon-games.txt", "shakespeare": "tinyshakespeare.txt"}


def _real(workload: Workload) -> list[np.ndarray] | None:
    folder = os.environ.get("DPFORMER_DATA")
    path = Path(folder or "", _FILES.get(workload.name, "none"))
    if not folder or not path.is_file():
        return None
    if workload.name == "shakespeare":
        text = path.read_text()
        alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
        codes = np.array([alphabet[c] for c in text])
        size = workload.max_length + 1
        return list(codes[: len(codes) // size * size].reshape(-1, size))
    pairs = np.loadtxt(path, dtype=np.int64)
    starts = np.flatnonzero(np.diff(pairs[:, 0], prepend=-1))
    return [user - 1 for user in np.split(pairs[:, 1], starts[1:])]


def _made_up(workload: Workload, rng: np.random.Generator) -> list[np.ndarray]:
    """Log-normal lengths, with the medians of the real data unless told: the shape is right, the items are noise."""
    median = workload.made_up or {"ml-1m": 96, "games": 6}.get(workload.name, workload.max_length + 1)
    lengths = np.full(2000, median) if median > workload.max_length else rng.lognormal(np.log(median), 1.0, 2000)
    return [rng.integers(0, workload.items, max(2, int(n))) for n in lengths]
