"""Load test of `dpformer serve`: requests per second, and latency at a fixed rate, with 1 and 4 workers.

    python -m benchmarks.load RUN [--workers 1 4] [--rounds 6] [--seconds 5] [--connections 16] [--share 0.5]

The very command runs, on the cores that the client uses too, once for each number of workers, and they take turns: in
each round each is asked as fast as the connections can (throughput), and then at --share of its first throughput on
schedule, where time counts from the schedule (p50 and p99 without coordinated omission). It prints medians of the
rounds, the processor time of the service per request, and the median of the ratios to the first number of workers,
in which other work on the machine cancels. `memory` is the proportional set size of all processes together, in which
what workers share counts once.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.serve import ask, bodies, load, processor_seconds


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


def processes(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in processes(int(child)))]


def memory(pid: int) -> float:
    """Proportional set size, MB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(value) for value in re.findall(r"^Pss: +(\d+)", rollup, re.MULTILINE)) / 1024


def spent(pid: int) -> float:
    """Processor seconds of a process and its descendants."""
    return sum(processor_seconds(each) for each in processes(pid))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.5, help="of the throughput, as the rate of the second part")
    given = parser.parse_args()
    cores, before = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    asked = bodies(given.run, 2000, seed=0)
    found: dict[int, list[list[float]]] = {workers: [] for workers in given.workers}
    with ExitStack() as stack:
        services = {workers: stack.enter_context(service(given.run, workers)) for workers in given.workers}
        rates = {
            workers: given.share * asyncio.run(throughput(port, asked, given.connections, given.seconds))
            for workers, (_, port) in services.items()
        }
        for _ in range(given.rounds):
            for workers, (pid, port) in services.items():
                began = spent(pid)
                rate = asyncio.run(throughput(port, asked, given.connections, given.seconds))
                cost = 1000 * (spent(pid) - began) / (rate * given.seconds)
                some = [asked[n % len(asked)] for n in range(int(rates[workers] * given.seconds))]
                taken = 1000 * np.array(asyncio.run(load(port, some, rates[workers])))
                found[workers].append([rate, cost, *np.percentile(taken, (50, 99))])
        memories = {workers: sum(map(memory, processes(pid))) for workers, (pid, _) in services.items()}
    print(f"{cores} cores with the client, load average {before:.1f} before, {os.getloadavg()[0]:.1f} after")
    first = np.array(found[given.workers[0]])
    for workers, rounds in found.items():
        rate, cost, p50, p99 = np.median(rounds, axis=0)
        ratios = np.median(np.array(rounds) / first, axis=0)
        print(
            f"workers {workers}: {rate:,.0f} requests/s ({ratios[0]:.2f}), {cost:.2f} ms of processor time "
            f"({ratios[1]:.2f}); at {rates[workers]:,.0f} requests/s p50 {p50:.1f} ms ({ratios[2]:.2f}), "
            f"p99 {p99:.1f} ms ({ratios[3]:.2f}); memory {memories[workers]:,.0f} MB"
        )


if __name__ == "__main__":
    main()
