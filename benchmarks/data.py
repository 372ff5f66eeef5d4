"""Preparing a log, counting it, ranking held-out items: processor time beside what DuckDB needs, in one run, in turns.

    python -m benchmarks.data --interactions 10000000

The baseline reads the CSV with its types given, numbers users and items by joins and sorts by user and time: the least
that preparing has to do. Each measurement is a process of its own with one thread; peak memory is the process's.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BLOCK = 1_000_000
ITEMS_A_USER, ITEMS = 50, 50_000


def write(path: Path, interactions: int) -> None:
    """A log of fifty interactions a user on average, long-tailed items, times in no order, ids of text."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        file.write("user_id,item_id,rating,timestamp\n")
        for start in range(0, interactions, BLOCK):
            size = min(BLOCK, interactions - start)
            users = rng.integers(0, max(2, interactions // ITEMS_A_USER), size).tolist()
            items = (ITEMS ** rng.random(size)).astype(np.int64).tolist()  # Zipf
            times = rng.integers(1_500_000_000, 1_700_000_000, size).tolist()
            file.writelines(f"user-{u},item-{i},4.5,{t}\n" for u, i, t in zip(users, items, times, strict=True))


def baseline(path: Path) -> dict[str, float]:
    """What DuckDB needs to read, encode and sort."""
    import duckdb

    began = time.process_time()
    columns = "{'user_id': 'VARCHAR', 'item_id': 'VARCHAR', 'rating': 'DOUBLE', 'timestamp': 'BIGINT'}"
    with duckdb.connect(config={"threads": "1"}) as connection:
        connection.execute(f"CREATE TABLE raw AS SELECT * FROM read_csv('{path}', columns = {columns}, header = true)")
        for table, column in (("users", "user_id"), ("items", "item_id")):
            connection.execute(
                f"CREATE TABLE {table} AS SELECT {column} AS id, row_number() OVER () - 1 AS code FROM "
                f"(SELECT DISTINCT {column} FROM raw)"
            )
        connection.execute(
            "CREATE TABLE ordered AS SELECT users.code AS u, items.code AS i, timestamp AS t FROM raw JOIN users ON "
            "user_id = users.id JOIN items ON item_id = items.id ORDER BY users.code, timestamp, raw.rowid"
        )
        connection.execute("SELECT i FROM ordered").fetchnumpy()
    return {"duckdb": time.process_time() - began}


def prepared(path: Path) -> dict[str, float]:
    from dpformer.data import prepare

    began = time.process_time()
    dataset = prepare(path)
    return {"prepare": time.process_time() - began, "users": dataset.num_users, "items": dataset.num_items}


def counted(path: Path) -> dict[str, float]:
    from dpformer.accounting import calibrate
    from dpformer.data import prepare
    from dpformer.evaluation.evaluate import evaluate, popularity
    from dpformer.kinds.ranking import ranker
    from dpformer.models.counts import TransitionCounts
    from dpformer.queries.transitions.backend import transition_sums
    from dpformer.queries.transitions.rounds import release_transition_sums

    dataset = prepare(path, max_length=None)
    noise = calibrate(epsilon=5, delta=0.1 / dataset.num_users, sample_rate=1.0, steps=1)
    began = time.process_time()
    with transition_sums(dataset) as sums:
        release = release_transition_sums(sums, dataset.num_items, noise, seed=0)
    counts, began = time.process_time() - began, time.process_time()
    model = TransitionCounts.from_release(release)
    for placing in (ranker(model), popularity(dataset)):  # what `dpformer evaluate` does after reading
        evaluate(placing, dataset).metrics((10,))
    evaluation = time.process_time() - began
    return {"counts": counts, "evaluate": evaluation, "pairs_released": len(release.pairs)}


MEASURED = {"baseline": baseline, "prepared": prepared, "counted": counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interactions", type=int, default=10_000_000)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, path = options.measure
        facts = {key: round(value, 2) for key, value in MEASURED[name](Path(path)).items()}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({**facts, "peak_gib": round(peak, 2)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.csv"
        write(path, options.interactions)
        found = {}
        for name in MEASURED:
            command = [sys.executable, "-m", "benchmarks.data", "--measure", name, str(path)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            found[name] = json.loads(done.stdout)
            print(json.dumps({"interactions": options.interactions, "cpu_seconds": found[name]}), flush=True)
        print(json.dumps({"prepare_over_duckdb": round(found["prepared"]["prepare"] / found["baseline"]["duckdb"], 2)}))


if __name__ == "__main__":
    main()
