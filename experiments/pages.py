"""Tables and figures of docs/, from the store alone, in seconds: python -m experiments.pages

Pages are written by hand; between <!-- NAME --> and <!-- end of NAME --> stands what is made here.
"""

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from experiments.cells import EPSILONS, GRIDS, HEAT_MAPS, ITEMS, TITLES, heat_maps
from experiments.literal import everything
from experiments.store import ROOT, load

from experiments import choosing, literal_tables, plots, tables

PAGES = (
    "benchmarks/paper.md",
    "experiments/paper.md",
    "experiments/reattention.md",
    "results/paper-details.md",
    "results/paper-runs.md",
    "results/counts.md",
    "results/join.md",
    "privacy/choosing-epsilon.md",
)
JOIN = ROOT / "docs" / "results" / "join.json"
BLOCK = re.compile(r"<!-- (?P<name>[^>]+?) -->\n.*?<!-- end of (?P=name) -->", re.DOTALL)


def blocks(docs: Path, page: Path) -> dict[str, Callable[[], str]]:
    """What can stand on a page, by name. Figures are written to docs/results."""
    out = docs / "results"

    def _image(path: Path | None, title: str, command: str) -> str:
        command = f"`DPFORMER_DATA=FOLDER python -m experiments.{command}`"
        if path is None:
            return f"*Not there yet: {command}, then `python -m experiments.pages`.*"
        return f"![{title}]({Path(os.path.relpath(path, page.parent)).as_posix()})"

    made: dict[str, Callable[[], str]] = {
        "ablations": lambda: tables.changes(),
        "activations": tables.activations,
        "attention maps": lambda: _image(_there(out / "attention-ml-1m.svg"), "Attention maps", "attention_maps"),
        "counts": lambda: tables.counted(ITEMS, EPSILONS),
        "accuracy by budget": choosing.table,
        "long tail": lambda: _image(
            plots.long_tail(out / "long-tail.svg"), "Share of users by item", "fill popularity"
        ),
        "where seeds are cheap": lambda: tables.cheaply(),
        "tinyshakespeare": lambda: tables.texts(EPSILONS),
        "tinyshakespeare curves": lambda: _image(
            plots.shakespeare(out / "tinyshakespeare.svg"), "Held-out loss", "fill tinyshakespeare"
        ),
        "settings": tables.settings,
        "other settings": lambda: tables.compared(),
        "correlated noise": lambda: tables.in_bands(),
        "signals": lambda: _image(plots.signals(out / "signals.svg"), "Accuracy by q√T/σ", "fill ml-1m"),
        "warm start": tables.warmed,
        "join": lambda: tables.joined(list(json.loads(JOIN.read_text(encoding="utf-8")).values())),
        "missing": missing,
        "commands": commands,
        "renormalised pairs": tables.pairs,
        "attention at length": tables.at_length,
        "gains": literal_tables.gains,
        "pairs by epoch": literal_tables.by_epoch,
        "parts of Re-Attention": literal_tables.of_parts,
        "contests": literal_tables.contests,
        "finals": literal_tables.finals,
    }
    for data in ("ml-1m", "games"):
        made[f"{data} table"] = lambda d=data: literal_tables.table(d)  # type: ignore[misc]
        made[f"{data} accuracy"] = lambda d=data: _accuracy(d)  # type: ignore[misc]
        made[f"{data} convergence"] = lambda d=data: _image(  # type: ignore[misc]
            plots.convergence(d, out / f"convergence-{d}.svg"), f"{TITLES[d]}: accuracy by epoch", f"fill {d}"
        )
    for data in HEAT_MAPS:
        made[f"{data} heat maps"] = lambda d=data: _image(  # type: ignore[misc]
            plots.heat(d, out / f"heat-{d}.svg"),
            f"{TITLES[d]}: batch × learning rate",
            f"fill {d} epochs={GRIDS[d]['epochs']}",
        )
    return made


def _accuracy(data: str) -> str:
    return "\n\n".join(f"**ε = {epsilon}**\n\n{tables.accuracy(data, epsilon)}" for epsilon in EPSILONS)


def commands() -> str:
    """Every run that is in the store, with the command that repeats it."""
    there = [cell for cell in everything(load) if load(cell.name) is not None]
    return "\n".join(f"    {cell.command}" for cell in there)


def _there(path: Path) -> Path | None:
    return path if path.exists() else None


def missing() -> str:
    """What is not in the store, with the command that computes it, the most informative first."""
    every = everything(load)
    left = [cell for cell in every if load(cell.name) is None]
    hours = sum(cell.minutes for cell in left) / 60
    done = len(every) - len(left)
    if not left:
        return f"Nothing: all {done} runs are in the store."
    lines = "\n".join(f"    python -m experiments.fill {cell.name}  # {cell.minutes:.0f} min" for cell in left)
    return (
        f"{done} of {done + len(left)} runs are in the store. The others take about {hours:.0f} hours of one core; "
        "`DPFORMER_DATA=FOLDER python -m experiments.fill` computes them in this order and can be stopped at any time. "
        f"Of those, {len([cell for cell in heat_maps(*HEAT_MAPS) if load(cell.name) is None])} belong to heat maps.\n\n"
        f"<details><summary>One by one</summary>\n\n{lines}\n\n</details>"
    )


def write(page: Path, made: dict[str, Callable[[], str]]) -> None:
    """Fills the blocks of a page; a block nobody can make is an error."""

    def fill(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in made:
            raise ValueError(f"{page.name} has a block {name!r}; there are {', '.join(made)}")
        return f"<!-- {name} -->\n{made[name]()}\n<!-- end of {name} -->"

    page.write_text(BLOCK.sub(fill, page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    docs = parser.parse_args().docs
    for name in PAGES:
        write(docs / name, blocks(docs, docs / name))


if __name__ == "__main__":
    main()
