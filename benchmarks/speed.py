"""Speed and memory of private training beside what else there is, each contender in its own process.

    python -m benchmarks.speed                       # all of it: tables, JSON and plots into docs/results/
    python -m benchmarks.speed --workloads ml-1m --contenders plain phantom

Everything is a ratio within one run on one machine. Run it alone: the numbers of a busy machine mean nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.contenders import CONTENDERS
from benchmarks.page import RESULTS, put
from benchmarks.workloads import WORKLOADS

TITLES = {
    "plain": "plain PyTorch, not private",
    "own-nonprivate": "dpformer, not private",
    "phantom": "**Phantom Clipping**",
    "phantom-reattention": "**Phantom Clipping + Re-Attention**",
    "ghost-unshared": "Ghost Clipping (not shared, half dimension)",
    "vmap": "vmap, exact on the tied model",
    "opacus-hooks": "Opacus `hooks`, tied by module",
    "opacus-ghost-unshared": "Opacus `ghost`, not shared (refuses or is wrong on ties)",
    "jax-privacy": "jax-privacy (vmap), exact on the tied model",
}
# Measured several times: their ratios are close.
OFTEN = ("plain", "own-nonprivate", "phantom", "phantom-reattention")
RATIOS = [  # name, numerator, denominators (the best of them), key, and the aim for each workload
    ("private / own non-private", "phantom", ["own-nonprivate"], "users_per_second", (0.90, 0.90, 0.85)),
    ("private / plain PyTorch", "phantom", ["plain"], "users_per_second", (2.0, 5.0, 0.85)),
    (
        "private / best exact peer",
        "phantom",
        ["vmap", "opacus-hooks", "jax-privacy"],
        "users_per_second",
        (3.0, 10.0, 1.5),
    ),
    ("Re-Attention / vanilla", "phantom-reattention", ["phantom"], "users_per_second", (0.80, 0.85, 0.80)),
    ("peak memory, private / own", "phantom", ["own-nonprivate"], "peak_mib", (1.15, 1.15, 1.25)),
]


def run(contender: str, workload: str, seconds: float, threads: int, **change: int) -> dict[str, Any]:
    """One contender in a fresh process; what it says on failure is kept, for a refusal is a result too."""
    command = [sys.executable, "-m", "benchmarks.contenders", contender, workload]
    command += ["--seconds", str(seconds), "--threads", str(threads), "--change", json.dumps(change)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["killed"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def better(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The faster of two measurements of the same thing, with the lower peak: what disturbs only makes it worse."""
    if "error" in one or "error" in other:
        return one if "error" in other else other
    faster = max(one, other, key=lambda facts: facts["users_per_second"])
    return {**faster, "peak_mib": min(one["peak_mib"], other["peak_mib"])}


def ratio(facts: dict[str, dict], over: str, under: list[str], key: str) -> float | None:
    values = [facts[name][key] for name in under if key in facts.get(name, {})]
    if not values or key not in facts.get(over, {}):
        return None
    return facts[over][key] / max(values)


def markdown(results: dict[str, dict[str, dict]]) -> str:
    lines = ["Users per second (best step; peak memory in MiB behind it):", ""]
    lines += ["| | " + " | ".join(results) + " |", "| --- |" + " --- |" * len(results)]
    for name in CONTENDERS:
        cells = []
        for facts in results.values():
            fact = facts.get(name, {})
            text = f"{fact['users_per_second']:.3g} ({fact['peak_mib']:.0f})" if "peak_mib" in fact else "–"
            cells.append(text if "error" not in fact else "fails")
        lines.append(f"| {TITLES[name]} | " + " | ".join(cells) + " |")
    lines += ["", "| ratio (aim) | " + " | ".join(results) + " |", "| --- |" + " --- |" * len(results)]
    for title, over, under, key, aims in RATIOS:
        cells = []
        for workload, facts in results.items():
            aim = aims[list(WORKLOADS).index(workload)]
            value = ratio(facts, over, under, key)
            cells.append("–" if value is None else f"{value:.2f} ({'≤' if key == 'peak_mib' else '≥'} {aim:g})")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    errors = [
        f"- {TITLES[name]} on {workload}: `{fact['error']}`"
        for workload, facts in results.items()
        for name, fact in facts.items()
        if "error" in fact
    ]
    return "\n".join([*lines, *(["", "What failed:", "", *errors] if errors else [])]) + "\n"


def plot(results: dict[str, dict[str, dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4.2 * len(results), 3.6), constrained_layout=True)
    for axis, (workload, facts) in zip(list(axes) if len(results) > 1 else [axes], results.items(), strict=True):
        names = [name for name in CONTENDERS if "users_per_second" in facts.get(name, {})]
        values = [facts[name]["users_per_second"] for name in names]
        colours = ["#2563eb" if name.startswith("phantom") else "#9aa4b2" for name in names]
        axis.barh(names, values, color=colours)
        axis.invert_yaxis()
        axis.bar_label(axis.containers[0], fmt="%.3g", padding=2, fontsize=8)
        axis.set_title(workload)
        axis.set_xlabel("users a second")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def show(results: dict[str, dict[str, dict]]) -> None:
    table = Table("users/s (peak MiB)", *results)
    for name in CONTENDERS:
        cells = []
        for facts in results.values():
            fact = facts.get(name, {})
            cells.append(
                f"{fact['users_per_second']:.1f} ({fact['peak_mib']:.0f})"
                if "peak_mib" in fact
                else str(fact.get("error", "–"))[:40]
            )
        table.add_row(name, *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seconds", type=float, default=15, help="time each contender is measured")
    parser.add_argument(
        "--rounds", type=int, default=2, help="ours and plain are measured so often, in turns; the best counts"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for speed.json, speed.svg and the table in speed.md"
    )
    given = parser.parse_args()
    results: dict[str, dict[str, dict]] = {w: {} for w in given.workloads}
    turns = [(turn, c) for turn in range(given.rounds) for c in given.contenders if turn == 0 or c in OFTEN]
    jobs = [(w, c) for w in given.workloads for _, c in turns]
    for workload, contender in track(jobs, description="measuring"):
        found = run(contender, workload, given.seconds, given.threads)
        results[workload][contender] = better(found, results[workload].get(contender, found))
    facts = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": given.threads,
        "results": results,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "speed.json").write_text(json.dumps(facts, indent=2) + "\n")
    put("speed", markdown(results), given.out / "speed.md")
    plot(results, given.out / "speed.svg")
    show(results)


if __name__ == "__main__":
    main()
