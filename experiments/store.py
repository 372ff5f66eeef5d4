"""The store of results: one JSON file a run under docs/results/runs/, never computed twice.

A run that is not finished lives in a run folder under .experiments/ (private, not committed) and is resumed from its
checkpoint. Several processes may fill the store at the same time: each run is locked by the one that computes it.
"""

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.cells import Cell

from dpformer.training import resume, train
from dpformer.training.config import Config

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "docs" / "results" / "runs"
WORK = ROOT / ".experiments"
LOCAL = ("file", "cache", "catalog", "tokenizer")  # paths of this machine: not part of a result


def load(name: str) -> dict[str, Any] | None:
    """The result of a cell, None if it has not been run."""
    path = RUNS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def fill(cell: Cell, threads: int) -> dict[str, Any] | None:
    """Runs a cell, or goes on with it, and stores the result; None if another process is at it."""
    with _locked(cell.name) as mine:
        if not mine or load(cell.name) is not None:
            return load(cell.name)
        folder, began = WORK / cell.name, time.time()
        if (folder / "config.toml").exists():
            run = resume(folder)
        else:
            run = train(cell.config().but(threads=threads), folder)
        result = _result(cell, run.config, folder, run.statement, began)
        RUNS.mkdir(parents=True, exist_ok=True)
        partial = RUNS / f".{cell.name}.tmp"
        partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(RUNS / f"{cell.name}.json")
        return result


def _result(cell: Cell, config: Config, folder: Path, facts: dict[str, Any], began: float) -> dict[str, Any]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "seconds" in record]
    curve = [{k: v for k, v in record.items() if k != "covered"} for record in records if "split" in record]
    for point in curve:
        near = [record["loss"] for record in steps if record["step"] <= point["step"] and record["loss"]]
        point["training_loss"] = round(near[-1], 4) if near else None
    values = json.loads(config.model_dump_json())
    return {
        "cell": cell.name,
        "data": cell.data,
        "seed": config.seed,
        "config": {k: v for k, v in values.items() if k not in LOCAL and v is not None},
        "epsilon": facts["epsilon"],
        "delta": facts["delta"],
        "curve": curve,
        "seconds": round(sum(record["seconds"] for record in steps) or time.time() - began, 1),
        "revision": _revision(),
    }


def _revision() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()


@contextmanager
def _locked(name: str) -> Iterator[bool]:
    WORK.mkdir(exist_ok=True)
    lock = os.open(WORK / f"{name}.lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(lock)
