"""Latency of the service under an even load, beside a plain popularity endpoint under the same load in the same run.

    python -m benchmarks.serve RUN [--rate 200] [--seconds 15] [--limit 55]

Each server has one core to itself, the client another. Requests leave on schedule, whether earlier ones are answered or
not, and time counts from the schedule: a server that stalls is not spared (no coordinated omission). The two servers
take turns of a second each, so that whatever else the machine does falls on both. It ends after --limit seconds, with
as many turns as there were; processor time per request does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.serving.shapes import RecommendRequest

CONNECTIONS = 16
PATIENCE = 5.0  # seconds after a turn's last request in which answers still count; the others are late
LENGTH, K = 20, 10


def serve_model(run: str, core: int, ready: Any) -> None:
    import torch

    from dpformer.serving import Limits, Served, create_app
    from dpformer.serving.http import Server, listening

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    with listening("127.0.0.1", 0) as socket:
        ready.send((socket.getsockname()[1], os.getpid()))
        Server(create_app(Served.open(run)), Limits()).run([socket])


def serve_popularity(run: str, core: int, ready: Any) -> None:
    """The least that such a service can be: the same framework, the same checks, one list for everybody."""
    from fastapi import FastAPI

    from dpformer.runs import load_release
    from dpformer.serving import Limits
    from dpformer.serving.http import Server, listening

    os.sched_setaffinity(0, {core})
    release = load_release(Path(run) / "model.safetensors")
    assert release.frequencies is not None
    popular = [str(release.vocabulary[item]) for item in np.argsort(-release.frequencies)[:K]]
    app = FastAPI()

    async def recommend(asked: RecommendRequest) -> dict[str, list[str]]:
        return {"recommendations": popular[: asked.k]}

    app.post("/recommend")(recommend)
    with listening("127.0.0.1", 0) as socket:
        ready.send((socket.getsockname()[1], os.getpid()))
        Server(app, Limits()).run([socket])


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    head = (
        f"POST /recommend HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    head += "\r\n\r\n"
    writer.write(head.encode() + body)
    headers = await reader.readuntil(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200"), headers
    size = next(line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(size.split(b":")[1]))


async def load(port: int, bodies: list[bytes], rate: float) -> list[float]:
    """Seconds from schedule to answer."""
    free: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await asyncio.open_connection("127.0.0.1", port))
    taken: list[float] = []

    async def one(due: float, body: bytes) -> None:
        connection = await free.get()
        await ask(*connection, body)
        taken.append(time.perf_counter() - due)
        free.put_nowait(connection)

    start, tasks = time.perf_counter() + 0.05, []
    for number, body in enumerate(bodies):
        due = start + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(due, body)))
    _, late = await asyncio.wait(tasks, timeout=PATIENCE)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while not free.empty():
        free.get_nowait()[1].close()
    return taken + [float("inf")] * len(late)


def bodies(run: str, count: int, seed: int) -> list[bytes]:
    """Histories of popular items, made up."""
    from dpformer.runs import load_release

    release = load_release(Path(run) / "model.safetensors")
    assert release.frequencies is not None
    random, shares = np.random.default_rng(seed), release.frequencies / release.frequencies.sum()
    drawn = random.choice(len(shares), size=(count, LENGTH), p=shares)
    return [json.dumps({"history": [release.vocabulary[i] for i in row], "k": K}).encode() for row in drawn.tolist()]


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(run: str, rate: float, seconds: int, limit: float) -> dict[str, dict[str, float]]:
    end, cores = time.monotonic() + limit, sorted(os.sched_getaffinity(0))
    context, servers = multiprocessing.get_context("spawn"), {}
    for name, target in (("counts", serve_model), ("popularity", serve_popularity)):
        here, there = context.Pipe()
        process = context.Process(target=target, args=(run, cores[0], there), daemon=True)
        process.start()
        there.close()  # so that a dead server gives end-of-file instead of blocking
        servers[name] = (process, *here.recv())
    os.sched_setaffinity(0, {cores[-1]})
    asked, taken = bodies(run, int(rate), 0), {name: [] for name in servers}
    spent = dict.fromkeys(servers, 0.0)
    for turn in range(-2, seconds):  # two turns to warm up
        if turn > 0 and time.monotonic() > end:
            break
        for name, (_, port, number) in servers.items():
            before = processor_seconds(number)
            found = asyncio.run(load(port, asked, rate))
            if turn >= 0:
                taken[name] += found
                spent[name] += processor_seconds(number) - before
    for process, *_ in servers.values():
        process.terminate()
    return {name: _facts(values, spent[name]) for name, values in taken.items()}


def _facts(taken: list[float], spent: float) -> dict[str, float]:
    milliseconds = 1000 * np.array(taken)
    found = {f"p{q:g}": float(np.percentile(milliseconds, q)) for q in (50, 95, 99)}
    return {**found, "processor_ms": 1000 * spent / len(taken), "requests": len(taken)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=55, help="seconds after which no turn is begun")
    given = parser.parse_args()
    print(f"{given.rate:g} requests a second, load of the machine {os.getloadavg()[0]:.1f}; milliseconds")
    for name, facts in measure(given.run, given.rate, given.seconds, given.limit).items():
        print(f"{name:<12}" + "  ".join(f"{key} {value:.2f}" for key, value in facts.items()))


if __name__ == "__main__":
    main()
