"""Our own training, not private, private and with Re-Attention, in one process and in turns: ratios of a noisy machine.

    python -m benchmarks.turns ml-1m games --rounds 8

CPU time of whole steps on one thread. What disturbs one contender disturbs the next one too, so these ratios vary by a
few hundredths where those of `benchmarks.speed`, a process each, vary by a tenth.
"""

import argparse
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import ours  # noqa: F401  (it puts itself on the list)
from benchmarks.register import CONTENDERS
from benchmarks.workloads import WORKLOADS

NAMES = ("own-nonprivate", "phantom", "phantom-reattention")
RATIOS = (("private / own", "own-nonprivate", "phantom"), ("Re-Attention / vanilla", "phantom", "phantom-reattention"))


def measure(workload: str, rounds: int) -> dict[str, float]:
    """Seconds of CPU time of the best step of each contender."""
    torch.manual_seed(0)
    sequences = WORKLOADS[workload].sequences()
    steps = {name: CONTENDERS[name](WORKLOADS[workload], sequences) for name in NAMES}
    for step in steps.values():
        step()
    best = dict.fromkeys(NAMES, float("inf"))
    for _ in track(range(rounds), description=workload):
        for name, step in steps.items():
            start = time.process_time()
            step()
            best[name] = min(best[name], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)  # CPU time of several threads is not time
    table = Table("workload", *(f"{name}, s" for name in NAMES), *(title for title, _, _ in RATIOS))
    for workload in given.workloads:
        best = measure(workload, given.rounds)
        ratios = (f"{best[under] / best[over]:.2f}" for _, under, over in RATIOS)
        table.add_row(workload, *(f"{best[name]:.3f}" for name in NAMES), *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
