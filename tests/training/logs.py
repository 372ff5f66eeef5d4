"""A small log, for runs that take seconds."""

import random
from pathlib import Path


def write_log(path: Path, users: int = 60, items: int = 20, seed: int = 0) -> Path:
    """Users walk through the items in order from somewhere, 1 to 9 of them."""
    rng = random.Random(seed)
    lines = ["user_id,item_id,timestamp"]
    for user in range(users):
        start = rng.randrange(items)
        lines += [f"u{user},i{(start + t) % items},{t}" for t in range(rng.randrange(1, 10))]
    path.write_text("\n".join(lines) + "\n")
    return path
