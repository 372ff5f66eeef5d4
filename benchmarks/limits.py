"""The largest vocabulary and logical batch in the documented limits: steps of real training, and what they take.

    python -m benchmarks.limits            # each case in a process of its own, whose peak memory is measured

| case | what |
| --- | --- |
| items | a vocabulary of 10⁶ items, shared embedding of width 64 |
| batch | an expected batch of 10⁵ users out of 2·10⁵ |
| counts | transition counts of 10⁵ users over 10⁶ items |
| history | one user with 10⁶ items among others |
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

CASES: dict[str, dict[str, Any]] = {
    "items": {"users": 2000, "items": 1_000_000, "length": 50, "batch": 32},
    "batch": {"users": 200_000, "items": 3_000, "length": 9, "batch": 100_000},
    "counts": {"users": 100_000, "items": 1_000_000, "length": 20, "batch": None},
    "history": {"users": 1000, "items": 3_000, "length": 20, "batch": 500, "longest": 1_000_000},
}
STEPS = 2


def measure(name: str) -> dict[str, Any]:
    """Trains a few steps of a case, or releases the counts, in this process."""
    import torch

    from dpformer.data import Dataset
    from dpformer.kinds.network import build_model, make_trainer
    from dpformer.noise import SecureRandom
    from dpformer.queries.released import release_before_training
    from dpformer.runs.config import Config
    from dpformer.runs.planning import make_plan

    torch.set_num_threads(1)
    case = CASES[name]
    generator = np.random.default_rng(0)
    # Popularity falls as 1/rank; every history has full length.
    drawn = np.exp(generator.random((case["users"], case["length"])) * np.log(case["items"])).astype(np.int64) - 1
    longest = [generator.integers(0, case["items"], case["longest"])] if "longest" in case else []
    data = Dataset.from_histories([*drawn, *longest], case["items"], max_length=case["length"])
    model = "counts" if case["batch"] is None else "transformer"
    choices = {"max_length": case["length"], "epochs": 1, "batch_size": case["batch"]} if case["batch"] else {}
    config = Config.make(model=model, **choices).resolve(users=data.num_users, threads=1)
    plan, random = make_plan(config, data.num_users), SecureRandom("benchmark")
    before, began, seconds = _peak(), time.monotonic(), []
    if model == "counts":
        made = release_before_training(config, plan, data, random).transitions
        assert made is not None
        took = {"seconds": round(time.monotonic() - began, 1), "pairs": len(made.pairs)}
        return {"case": name, **case, **took, "MB before": before, "MB at most": _peak()}
    released = release_before_training(config, plan, data, random)
    network = build_model(config, plan, data.num_items, released.frequencies, random)
    trainer = make_trainer(config, plan, data, network, random)
    for _ in range(STEPS):
        began = time.monotonic()
        step = trainer.advance()
        seconds.append(round(time.monotonic() - began, 1))
    assert trainer.sum.skipped_users == 0 and step.parts
    took = {"seconds a step": seconds, "users in the last batch": step.users}
    return {"case": name, **case, **took, "MB before": before, "MB at most": _peak()}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), help="only this one, in this process")
    case = parser.parse_args().case
    if case is not None:
        print(json.dumps(measure(case)), flush=True)
        return
    for name in CASES:
        subprocess.run([sys.executable, "-m", "benchmarks.limits", "--case", name], check=True)


if __name__ == "__main__":
    main()
