"""Load test of `dpformer serve`: requests per second, and latency at a fixed rate, with 1 and 4 workers.

    python -m benchmarks.load RUN [--workers 1 4] [--seconds 10] [--connections 16] [--share 0.5]

The very command runs, on the cores that the client uses too. Each number of workers is asked twice: as fast as the
connections can (throughput), and at --share of that throughput on schedule, where time counts from the schedule (p50
and p99 without coordinated omission). `memory` is the proportional set size of all processes together, in which what
workers share counts once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.serve import ask, bodies, load


@contextmanager
def service(run: str, workers: int) -> Iterator[tuple[int, int]]:
    """(process, port) of the command."""
    command = [sys.executable, "-m", "dpformer", "serve", run, "--port", "0", "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://.*?:(\d+)", line):
                yield process.pid, int(found[1])
                break
    finally:
        process.terminate()
        process.wait(60)


async def throughput(port: int, asked: list[bytes], connections: int, seconds: float) -> float:
    """Requests per second that so many connections get answered, each asking again at once."""
    end, counts = time.perf_counter() + seconds, [0] * connections

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            await ask(reader, writer, asked[(number + counts[number] * connections) % len(asked)])
            counts[number] += 1
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(connections)))
    return sum(counts) / (time.perf_counter() - began)


def memory(pid: int) -> float:
    """Proportional set size of a process and its descendants, MB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    own = sum(int(value) for value in re.findall(r"^Pss: +(\d+)", rollup, re.MULTILINE)) / 1024
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(memory(int(child)) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.5, help="of the throughput, as the rate of the second part")
    given = parser.parse_args()
    cores, before = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores with the client, load average {before:.1f} before; milliseconds")
    asked = bodies(given.run, 2000, seed=0)
    for workers in given.workers:
        with service(given.run, workers) as (pid, port):
            asyncio.run(throughput(port, asked, given.connections, 2))  # warm-up
            rate = asyncio.run(throughput(port, asked, given.connections, given.seconds))
            some = [asked[n % len(asked)] for n in range(int(given.share * rate * given.seconds))]
            taken = 1000 * np.array(asyncio.run(load(port, some, given.share * rate)))
            found = "  ".join(f"p{q} {np.percentile(taken, q):.1f}" for q in (50, 99))
            print(
                f"workers {workers}: {rate:,.0f} requests/s; at {given.share * rate:,.0f} requests/s {found} "
                f"({len(taken):,} requests); memory {memory(pid):,.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
