"""How long it takes to prepare a log, and how much memory: made-up interactions with ids of text, in each format.

    python benchmarks/prepare.py --interactions 10000000 --format csv

Each format is prepared by a fresh process, whose peak memory is measured. The aim for ten million interactions in CSV
on two cores: under a minute, under 4 GiB. `cpu_seconds` is what remains of `seconds` where nothing else runs.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SUFFIX = {"csv": ".csv", "plain": ".txt", "movielens": ".dat", "jsonl": ".jsonl", "parquet": ".parquet"}
BLOCK = 1_000_000


def write(path: Path, kind: str, interactions: int) -> None:
    """A log of ten interactions a user on average, long-tailed items, times in no order."""
    rng = np.random.default_rng(0)
    log = path.with_suffix(".csv") if kind == "parquet" else path
    with log.open("w") as file:
        if log.suffix == ".csv":
            file.write("user_id,item_id,rating,timestamp\n")
        for start in range(0, interactions, BLOCK):
            size = min(BLOCK, interactions - start)
            users = rng.integers(0, max(2, interactions // 10), size).tolist()
            items = (rng.pareto(1.0, size) * 100).astype(np.int64).clip(max=200_000).tolist()
            times = rng.integers(1_500_000_000, 1_700_000_000, size).tolist()
            file.writelines(map(LINES[kind], users, items, times))
    if kind == "parquet":
        import duckdb

        with duckdb.connect() as connection:
            connection.execute(f"COPY (SELECT * FROM read_csv('{log}')) TO '{path}' (FORMAT parquet)")


LINES = {
    "csv": lambda user, item, at: f"user-{user},item-{item},4.5,{at}\n",
    "parquet": lambda user, item, at: f"user-{user},item-{item},4.5,{at}\n",
    "plain": lambda user, item, at: f"{user} {item}\n",
    "movielens": lambda user, item, at: f"{user}::{item}::4::{at}\n",
    "jsonl": lambda user, item, at: f'{{"user_id": "user-{user}", "item_id": "item-{item}", "timestamp": {at}}}\n',
}


def measure(path: Path, cache: Path) -> None:
    """Prepares a log, then opens the cached form; prints JSON."""
    from dpformer.data import prepare

    started = time.perf_counter()
    dataset = prepare(path, cache=cache)
    prepared, cpu = time.perf_counter(), time.process_time()
    prepare(path, cache=cache)
    facts = {
        "users": dataset.num_users,
        "items": dataset.num_items,
        "interactions": dataset.num_interactions,
        "seconds": round(prepared - started, 1),
        "cpu_seconds": round(cpu, 1),
        "seconds_from_cache": round(time.perf_counter() - prepared, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    print(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interactions", type=int, default=10_000_000)
    parser.add_argument("--format", choices=[*SUFFIX, "all"], default="csv")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.measure.parent / "cache")
        return
    for kind in SUFFIX if options.format == "all" else [options.format]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"log{SUFFIX[kind]}"
            write(path, kind, options.interactions)
            command = [sys.executable, __file__, "--measure", str(path)]
            facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            size = round(path.stat().st_size / 2**20)
            print(json.dumps({"format": kind, "file_mib": size, **facts}), flush=True)


if __name__ == "__main__":
    main()
