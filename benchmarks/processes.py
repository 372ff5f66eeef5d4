"""Two processes of one thread against one process of two threads: seconds a step. Run it alone, on two cores or more.

    python -m benchmarks.processes            # on the synthetic default; writes docs/results/processes.json and .md
    python -m benchmarks.processes LOG.csv    # on a log

All runs have the same seed, so they take the same steps with the same users; the models are compared as well.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

RESULTS = Path(__file__).parent.parent / "docs" / "results"
LAUNCH = {  # name → arguments of python, and threads
    "1 process of 1 thread": (["-m"], 1),
    "1 process of 2 threads": (["-m"], 2),
    "2 processes of 1 thread": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"], 1),
}
CHOICES = ["--model", "transformer", "--max-length", "50", "--batch-size", "1000", "--epochs", "3"]
CHOICES += ["--micro-batch-tokens", "8192", "--seed", "0", "--checkpoint-seconds", "1000000"]


def seconds_a_step(launch: list[str], threads: int, file: list[str], out: Path) -> float:
    """The median over the steps of a run but the first two, which prove the engine and fill caches."""
    command = [sys.executable, *launch, "dpformer", "train", *file, *CHOICES, "--device", "cpu"]
    subprocess.run(
        [*command, "--threads", str(threads), "--out", str(out)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
    )
    lines = (out / "metrics.jsonl").read_text().splitlines()[2:]
    return statistics.median(json.loads(line)["seconds"] for line in lines)


def measure(file: list[str], rounds: int) -> dict[str, Any]:
    """Every launch in turn, several times; the fastest round of each counts."""
    load = os.getloadavg()[0]
    found: dict[str, list[float]] = {name: [] for name in LAUNCH}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name, (launch, threads) in LAUNCH.items():
                found[name].append(seconds_a_step(launch, threads, file, Path(folder) / f"{name} {number}"))
                print(f"{name:24} {found[name][-1]:.3f} s a step", flush=True)
        alike = ("1 process of 1 thread 0", "2 processes of 1 thread 0")
        one, two = (load_file(Path(folder) / name / "model.safetensors") for name in alike)
    apart = max(float((one[k].double() - two[k].double()).abs().max()) for k in one if one[k].dtype == torch.float32)
    return {
        "seconds": {name: round(min(times), 4) for name, times in found.items()},
        "all_seconds": found,
        "largest_difference_of_weights": apart,
        "load_before": load,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "data": "a log" if file else "the synthetic default",
        "choices": CHOICES,
    }


PAGE = """\
# Several processes

Seconds a step of `dpformer train --model transformer` (median over the steps of a run, the best of {rounds} runs), and
the speed relative to one process of two threads.

| | seconds a step | speed |
| --- | --- | --- |
{rows}

The weights of one process and of two, of one thread each, differ by {apart:.1g} at most after all steps.

Data: {data}. {cores} cores, torch {torch}, load before the run {load:.1f}: on a busy machine the ratio means little.
Command: `python -m benchmarks.processes`; all times are in [processes.json](processes.json).
"""


def page(facts: dict[str, Any]) -> str:
    """The results as Markdown."""
    seconds = facts["seconds"]
    best = seconds["1 process of 2 threads"]
    return PAGE.format(
        rounds=len(facts["all_seconds"]["1 process of 2 threads"]),
        rows="\n".join(f"| {name} | {value:.3f} | {best / value:.2f} |" for name, value in seconds.items()),
        apart=facts["largest_difference_of_weights"],
        load=facts["load_before"],
        **{name: facts[name] for name in ("data", "cores", "torch")},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder to write to")
    given = parser.parse_args()
    facts = measure([given.file] if given.file else [], given.rounds)
    (given.results / "processes.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (given.results / "processes.md").write_text(page(facts), encoding="utf-8")
    print(page(facts))


if __name__ == "__main__":
    main()
