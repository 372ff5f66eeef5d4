"""One contender alone in this process, as JSON: python -m benchmarks.contenders phantom ml-1m"""

import argparse
import json
import resource
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks import ours, peers  # noqa: F401  (they put themselves on the list)
from benchmarks.register import CONTENDERS
from benchmarks.workloads import WORKLOADS, Workload

SHARE = (
    4  # others are measured on one user in four: they are slow, and their speed does not depend on the logical batch
)


def measure(name: str, workload: Workload, seconds: float, threads: int) -> dict[str, float]:
    """Users per second (the best of several steps: the machine is noisy) and the peak memory of this process."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    sequences = workload.sequences()
    if CONTENDERS[name].__module__ == peers.__name__:
        sequences = sequences[: max(workload.physical, len(sequences) // SHARE)]
    step = CONTENDERS[name](workload, sequences)
    step()
    times, start = [], time.perf_counter()
    while len(times) < 2 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return {
        "users_per_second": len(sequences) / min(times),
        "median_users_per_second": len(sequences) / float(np.median(times)),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "steps": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--change", type=json.loads, default={}, help="JSON: fields of the workload to change")
    given = parser.parse_args()
    workload = replace(WORKLOADS[given.workload], **given.change)
    json.dump(measure(given.contender, workload, given.seconds, given.threads), sys.stdout)


if __name__ == "__main__":
    main()
