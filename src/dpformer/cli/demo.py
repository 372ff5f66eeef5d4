"""`dpformer demo`: train private recommenders and write a report, in a few minutes on two cores."""

from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.train import run_or_exit
from dpformer.kinds import auto
from dpformer.kinds.popularity import BASELINE
from dpformer.kinds.registry import KINDS
from dpformer.runs.config import Config


def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder to create.  [default: runs/demo]")] = None,
    epsilon: Annotated[float, typer.Option(help="Total privacy budget ε for the run.")] = 5.0,
    quick: Annotated[bool, typer.Option("--quick", help="Transition counts only; takes seconds.")] = False,
) -> None:
    """Train on the embedded synthetic data, compare with popularity, write the report.

    Trains two models: the one that `--model auto` chooses for this data, and the other one for comparison (in a second
    folder).
    """
    first = out or next(path for path in _names(Path("runs/demo")) if not path.exists())
    typer.echo(
        f"6,000 synthetic users, 400 items; ε = {epsilon:g}. First the recommended model, into {first}.\nEach step "
        "bounds what one user can contribute and hides it in noise. This takes a minute or two."
    )
    model = auto.UNDECIDED.name if quick else None
    recommended = run_or_exit(Config.make(epsilon=epsilon, model=model), first)
    runs = {recommended.config.model: recommended}
    if not quick:
        (other,) = (kind.name for kind in auto.CANDIDATES if kind is not recommended.config.kind)
        second = first.with_name(f"{first.name}-{other}")
        typer.echo(f"For comparison, {KINDS[other].phrase} into {second}.")
        runs[other] = run_or_exit(Config.make(epsilon=epsilon, model=other), second)
    from dpformer.report import write_report
    from dpformer.report.accuracy import measure

    _print({name: (run.statement, measure(run).to_dict()) for name, run in runs.items()})
    for run in runs.values():
        typer.echo(f"report: {write_report(run.folder)}")


def _names(path: Path) -> Any:
    """runs/demo, runs/demo-2, …"""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def _print(measured: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dpformer.evaluation.metrics import tracked
    from dpformer.format_number import round_up

    table = Table(title="Next item, full ranking, seen items excluded", title_justify="left")
    table.add_column("")
    for name in (*(metric.heading() for metric in tracked()), "ε", "δ"):
        table.add_column(name, justify="right")
    for name, (facts, accuracy) in measured.items():
        budget = (round_up(facts["epsilon"]), f"{facts['delta']:.2g}") if facts["private"] else ("none", "")
        table.add_row(KINDS[name].phrase, *_cells(accuracy["metrics"]["model"]), *budget)
    facts, accuracy = next(iter(measured.values()))
    table.add_row(BASELINE.title, *_cells(accuracy["metrics"][BASELINE.name]), "none", "")
    console = Console()
    console.print(table)
    console.print(facts["headline"], style="bold", highlight=False, markup=False)
    if len(measured) == 1:
        return
    console.print(
        "Each ε holds for one model alone; releasing both costs more. Few items and many users favour the network; "
        "on logs with thousands of items, counts were far better.",
        highlight=False,
    )


def _cells(metrics: dict[str, Any]) -> list[str]:
    from dpformer.evaluation.metrics import tracked

    return [f"{100 * metrics['served'][metric.label()]['value']:.1f}%" for metric in tracked()]
