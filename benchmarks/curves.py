"""How cost grows with vocabulary, length and logical batch: python -m benchmarks.curves

Synthetic users, each point in its own process; JSON, a table and plots go to docs/results/. Run it alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from rich.progress import track

from benchmarks.page import RESULTS, put
from benchmarks.speed import TITLES, run

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"plain": "#9aa4b2", "own-nonprivate": "#475569", "phantom": "#2563eb"}
# Curve: the workload it starts from, what stays, and the points: what changes, and who is measured there. Plain PyTorch
# needs all logits at once, several times: 6.4 GB each for 32 users of 50 positions and a million items.
ALL = tuple(COLOURS)
CURVES: dict[str, tuple[str, dict[str, int], list[tuple[int, dict[str, int], tuple[str, ...]]]]] = {
    "items": (
        "games",
        {"made_up": 6},
        [
            (1_000, {"items": 1_000, "batch": 512}, ALL),
            (10_000, {"items": 10_000, "batch": 512}, ALL),
            (100_000, {"items": 100_000, "batch": 256}, ALL),
            (1_000_000, {"items": 1_000_000, "batch": 64}, ("own-nonprivate", "phantom")),
        ],
    ),
    "length": (
        "ml-1m",
        {},
        [
            (n, {"max_length": n, "made_up": n + 1, "batch": max(32, 12_800 // n)}, ALL)
            for n in (50, 100, 200, 500, 1000)
        ],
    ),
    "logical batch": (
        "games",
        {"made_up": 6},
        [(n, {"batch": n}, ("own-nonprivate", "phantom")) for n in (64, 256, 1024, 6040, 20_000)],
    ),
}


def measure(seconds: float, threads: int) -> dict[str, list[dict[str, Any]]]:
    """curve → points: {"at", contender: facts}."""
    jobs = [(curve, *point) for curve, (_, _, points) in CURVES.items() for point in points]
    found: dict[str, list[dict[str, Any]]] = {curve: [] for curve in CURVES}
    for curve, at, change, contenders in track(jobs, description="measuring"):
        workload, fixed, _ = CURVES[curve]
        facts = {name: run(name, workload, seconds, threads, **fixed, **change) for name in contenders}
        found[curve].append({"at": at, **facts})
    return found


def markdown(curves: dict[str, list[dict[str, Any]]]) -> str:
    lines: list[str] = []
    for curve, points in curves.items():
        lines += [f"Users per second (peak memory in MiB) against {curve}:", ""]
        lines += [
            "| | " + " | ".join(f"{point['at']:,}" for point in points) + " |",
            "| --- |" + " --- |" * len(points),
        ]
        for name in COLOURS:
            cells = [_cell(point.get(name)) for point in points]
            lines.append(f"| {TITLES[name]} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "–"
    if "error" in facts:
        return "fails"
    return f"{facts['users_per_second']:,.{0 if facts['users_per_second'] >= 100 else 1}f} ({facts['peak_mib']:,.0f})"


def plot(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure, axes = plt.subplots(2, len(curves), figsize=(4.2 * len(curves), 6), constrained_layout=True)
    for column, (curve, points) in enumerate(curves.items()):
        for row, (key, title) in enumerate((("users_per_second", "users a second"), ("peak_mib", "peak memory, MiB"))):
            axis = axes[row][column]
            for name, colour in COLOURS.items():
                known = [(p["at"], p[name][key]) for p in points if key in p.get(name, {})]
                if known:
                    axis.plot(*zip(*known, strict=True), "o-", color=colour, label=TITLES[name].strip("*"))
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xlabel(curve)
            axis.set_title(title, fontsize=10)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for curves.json, curves.svg and the tables in speed.md"
    )
    given = parser.parse_args()
    curves = measure(given.seconds, given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
    put("curves", markdown(curves), given.out / "speed.md")
    plot(curves, given.out / "curves.svg")
    print(markdown(curves))


if __name__ == "__main__":
    main()
