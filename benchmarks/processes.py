"""Two processes of one thread against one process of two threads: seconds a step, median. Run as a program.

    python -m benchmarks.processes [FILE] [--max-length 200] [--micro-batch-tokens 16384]

Both runs have the same seed, so they take the same steps with the same users; the models are compared as well.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

LAUNCH = {
    "1 process, 2 threads": (["-m"], 2),
    "1 process, 1 thread": (["-m"], 1),
    "2 processes, 1 thread": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"], 1),
}


def seconds_a_step(launch: list[str], threads: int, choices: list[str], out: Path) -> float:
    """The median over the steps of a run but the first two, which prove the engine and fill caches."""
    command = [sys.executable, *launch, "dpformer", "train", *choices, "--threads", str(threads), "--out", str(out)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True)
    lines = (out / "metrics.jsonl").read_text().splitlines()[2:]
    return statistics.median(json.loads(line)["seconds"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--max-length", default="50")
    parser.add_argument("--batch-size", default="1000")
    parser.add_argument("--epochs", default="3")
    parser.add_argument("--micro-batch-tokens", default="8192")
    given = parser.parse_args()
    choices = [given.file] if given.file else []
    for name in ("max-length", "batch-size", "epochs", "micro-batch-tokens"):
        choices += [f"--{name}", getattr(given, name.replace("-", "_"))]
    choices += ["--seed", "0", "--checkpoint-seconds", "1000000"]
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for number, (name, (launch, threads)) in enumerate(LAUNCH.items()):
            found[name] = seconds_a_step(launch, threads, choices, Path(folder) / str(number))
            print(f"{name:24} {found[name]:.3f} s a step", flush=True)
        one, two = (load_file(Path(folder) / name / "model.safetensors") for name in ("1", "2"))
        apart = max(
            float((one[k].double() - two[k].double()).abs().max()) for k in one if one[k].dtype == torch.float32
        )
    print(f"speed-up                 {found['1 process, 2 threads'] / found['2 processes, 1 thread']:.2f}")
    print(f"largest difference between the models of 1 and 2 processes of 1 thread: {apart:.1g}")


if __name__ == "__main__":
    main()
