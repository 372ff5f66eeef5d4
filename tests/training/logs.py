"""A small log and small choices, for runs that take seconds."""

import random
from pathlib import Path
from typing import Any

from dpformer.kinds.network import OF_NETWORKS

TINY: dict[str, Any] = {
    "epsilon": 4.0,
    "batch_size": 20,
    "epochs": 4,
    "dim": 8,
    "blocks": 1,
    "max_length": 6,
    "threads": 1,
}


def tiny_choices(**changes: Any) -> dict[str, Any]:
    """Small choices with changes; without those of networks for counts, which refuse them."""
    chosen = {**TINY, **changes}
    return {name: value for name, value in chosen.items() if chosen.get("model") != "counts" or name not in OF_NETWORKS}


def write_log(path: Path, users: int = 60, items: int = 20, seed: int = 0) -> Path:
    """Users walk through the items in order from somewhere, 1 to 9 of them."""
    rng = random.Random(seed)
    lines = ["user_id,item_id,timestamp"]
    for user in range(users):
        start = rng.randrange(items)
        lines += [f"u{user},i{(start + t) % items},{t}" for t in range(rng.randrange(1, 10))]
    path.write_text("\n".join(lines) + "\n")
    return path
