"""Kills a run with SIGKILL at random moments, hundreds of times, and looks whether anything was lost or under-counted.

    python -m benchmarks.soak --runs 10 --kills 40 --seed 0
    python -m benchmarks.soak --steps 3000          # one long run instead: its memory over time

Each run is first made whole, then again with the same seed while it is killed `--kills` times: after random times, and,
every other time, within milliseconds of the moment at which a file appears (keys, checkpoint, releases, model,
statement), which random times hardly ever meet. At the end model, statement and metrics must be those of the whole run,
byte for byte, and `dpformer verify` must pass. Every third run is of transition counts with a private list of items and
without a seed: whatever was released before a kill must be what is released at the end.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tests.training.logs import TINY, write_log

from dpformer.runs import Config, resume, train
from dpformer.runs import run as _imported  # noqa: F401
from dpformer.verification.verify import verify

WRITTEN = ["checkpoint/keys.json", "checkpoint/state.safetensors", "releases.safetensors", "model.safetensors"]
WRITTEN += ["model.safetensors", "privacy.json"]


def log_of(folder: Path, seed: int) -> Path:
    """Of many users for counts, whose list of items is released."""
    many = {"users": 600, "items": 4} if seed % 3 == 2 else {}
    return write_log(folder / "log.csv", seed=seed, **many)


def config_of(log: Path, seed: int) -> Config:
    if seed % 3 == 2:
        return Config.make(file=log, model="counts", epsilon=8.0, threads=1)
    often = {"epochs": 24, "micro_batch_tokens": 40, "checkpoint_seconds": 0.0}
    each = {
        "seed": seed,
        "assume_items_public": True,
        "evaluate_every": 12 * (seed % 3),
        "private_metrics": seed % 2 == 0,
    }
    return Config.make(file=log, **{**TINY, **often, **each})


def child(config: Config, out: Path) -> int:
    """Starts or resumes the run in a process of its own; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        if out.exists():
            resume(out)
        else:
            train(config, out)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_until_done(config: Config, out: Path, kills: int, longest: float, rng: random.Random) -> dict[str, int]:
    """Kills up to `kills` processes; fails if one of them ends by itself with an error."""
    seen = {"kills": 0, "before the folder": 0, "before a checkpoint": 0, "while training": 0}
    seen |= {"at the end": 0, "after the statement": 0}
    released: dict[str, bytes] = {}
    while not (out / "privacy.json").exists() or (out / "checkpoint" / "keys.json").exists():
        pid = child(config, out)
        if seen["kills"] < kills:
            if seen["kills"] % 2:
                until_written(out, rng.choice(WRITTEN), pid)
                time.sleep(rng.choice([0, rng.uniform(0, 0.01)]))
            else:
                time.sleep(rng.uniform(0, longest))
            os.kill(pid, signal.SIGKILL)
        code = wait(pid)
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"a resumed process failed with exit code {code}")
        if code == -signal.SIGKILL:
            seen["kills"] += 1
            seen[stage(out)] += 1
        for name in ("model.safetensors", "releases.safetensors"):
            if (out / name).exists() and released.setdefault(name, (out / name).read_bytes()) != (
                out / name
            ).read_bytes():
                raise SystemExit(f"{name} was released twice, with other contents")
    return seen


def until_written(out: Path, name: str, pid: int) -> None:
    """Returns when a file has been written anew, or the process has ended."""
    before = written(out / name)
    while written(out / name) == before and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.0002)


def written(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def stage(out: Path) -> str:
    """Where a killed run stands, by what it left."""
    if (out / "privacy.json").exists():
        return "after the statement"
    if not out.exists():
        return "before the folder"
    if not (out / "checkpoint" / "state.safetensors").exists():
        return "at the end" if (out / "model.safetensors").exists() else "before a checkpoint"
    return "at the end" if (out / "model.safetensors").exists() else "while training"


def same(whole: Path, broken: Path) -> list[str]:
    """The names of what differs."""
    different = [
        name
        for name in ("model.safetensors", "privacy.json", "config.toml")
        if (whole / name).read_bytes() != (broken / name).read_bytes()
    ]
    records = [[_without_time(line) for line in (run / "metrics.jsonl").open()] for run in (whole, broken)]
    return different + (["metrics.jsonl"] if records[0] != records[1] else [])


def _without_time(line: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(line).items() if name != "seconds"}


def memory_over_steps(steps: int) -> dict[str, Any]:
    """One run of about so many steps in a process of its own, and its memory in MB, looked at 20 times a second."""
    seen: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(write_log(folder / "log.csv"), 0).replace(epochs=steps // 3, checkpoint_seconds=1.0)
        pid, metrics = child(config, folder / "run"), folder / "run" / "metrics.jsonl"
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            done = metrics.stat().st_size if metrics.exists() else 0
            seen.append((done, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))
            time.sleep(0.05)
        taken = len(metrics.read_text().splitlines())
    last = max(done for done, _ in seen)
    tenths = [[mb for done, mb in seen if tenth * last / 10 < done <= (tenth + 1) * last / 10] for tenth in range(10)]
    return {"steps": taken, "MB at each tenth of the run": [round(max(part), 1) for part in tenths if part]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further run after this time")
    parser.add_argument("--steps", type=int, help="one long run instead of many that are killed")
    arguments = parser.parse_args()
    if arguments.steps:
        print(json.dumps(memory_over_steps(arguments.steps)))
        return
    torch.set_num_threads(1)
    rng, total, began, runs = random.Random(arguments.seed), {}, time.monotonic(), 0
    for seed in range(arguments.runs):
        if time.monotonic() - began > 60 * arguments.minutes:
            break
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = config_of(log_of(folder, seed), seed)
            started = time.monotonic()
            if wait(child(config, folder / "whole")):
                raise SystemExit("the run without kills failed")
            seen = kill_until_done(config, folder / "broken", arguments.kills, 0.4 * (time.monotonic() - started), rng)
            different = [] if config.seed is None else same(folder / "whole", folder / "broken")
            if different:
                raise SystemExit(f"run {seed}: {', '.join(different)} differ after {seen['kills']} kills")
            result = verify(folder / "broken")
            if not result.passed:
                raise SystemExit(f"run {seed}: does not verify: {result.to_dict()}")
        runs += 1
        total = {name: total.get(name, 0) + count for name, count in seen.items()}
        print(json.dumps({"run": seed, **seen}), flush=True)
    print(json.dumps({"runs": runs, **total, "lost": 0, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
