"""Our own training, not private, private and with Re-Attention, in one process and in turns: ratios of a noisy machine.

    python -m benchmarks.turns ml-1m games --rounds 12

CPU time of whole steps on one thread. What disturbs one contender disturbs the next one too, so a ratio is taken in
each round, of steps that follow each other, and the median over the rounds is reported, with the middle half of them.
Ratios of the best steps stand beside it: they vary more, by the luck of one step.
"""

import argparse
import time

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import ours  # noqa: F401  (it puts itself on the list)
from benchmarks.register import CONTENDERS
from benchmarks.workloads import WORKLOADS

NAMES = ("own-nonprivate", "phantom", "phantom-reattention")
RATIOS = (("private / own", "own-nonprivate", "phantom"), ("Re-Attention / vanilla", "phantom", "phantom-reattention"))


def measure(workload: str, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of CPU time of each contender's steps; every second round goes backwards."""
    torch.manual_seed(0)
    sequences = WORKLOADS[workload].sequences()
    steps = {name: CONTENDERS[name](WORKLOADS[workload], sequences) for name in NAMES}
    for step in steps.values():
        step()
    seconds = {name: np.empty(rounds) for name in NAMES}
    for n in track(range(rounds), description=workload):
        for name in NAMES if n % 2 == 0 else reversed(NAMES):
            start = time.process_time()
            steps[name]()
            seconds[name][n] = time.process_time() - start
    return seconds


def ratio(over: np.ndarray, under: np.ndarray) -> str:
    low, middle, high = np.quantile(over / under, [0.25, 0.5, 0.75])
    return f"{middle:.2f} ({low:.2f} to {high:.2f}), best {over.min() / under.min():.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)  # CPU time of several threads is not time
    table = Table("workload", *(f"{name}, best s" for name in NAMES), *(title for title, _, _ in RATIOS))
    for workload in given.workloads:
        seconds = measure(workload, given.rounds)
        ratios = (ratio(seconds[one], seconds[other]) for _, one, other in RATIOS)
        table.add_row(workload, *(f"{seconds[name].min():.3f}" for name in NAMES), *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
