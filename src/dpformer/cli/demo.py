"""`dpformer demo`: from nothing to a private recommender and its report, in a few minutes on two cores."""

from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.train import run_or_exit
from dpformer.training.config import Config


def demo(
    out: Annotated[Path | None, typer.Option(help="The run folder to make.  [default: runs/demo]")] = None,
    epsilon: Annotated[float, typer.Option(help="ε of everything together.")] = 5.0,
) -> None:
    """Train on the embedded synthetic data, compare with popularity, write the report."""
    config = Config.make(epsilon=epsilon)
    folder = out or next(path for path in _names(Path("runs/demo")) if not path.exists())
    typer.echo(
        f"6,000 made-up users, 400 items. Training a Transformer with Re-Attention at ε = {epsilon:g} into {folder}.\n"
        "Each step bounds what one user can add, and hides it in noise."
    )
    run = run_or_exit(config, folder)
    from dpformer.report import write_report
    from dpformer.report.accuracy import measure

    _print(run.statement, measure(run).to_dict())
    typer.echo(f"report: {write_report(run.folder)}")


def _names(path: Path) -> Any:
    """runs/demo, runs/demo-2, …"""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def _print(statement: dict[str, Any], accuracy: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dpformer.privacy.statement import round_up

    table = Table(title="Next item, full ranking, seen items masked", title_justify="left")
    table.add_column("")
    for name in ("NDCG@10", "HIT@10", "ε", "δ"):
        table.add_column(name, justify="right")
    budget = (round_up(statement["epsilon"]), f"{statement['delta']:.2g}") if statement["private"] else ("none", "")
    for name, key, cells in (
        ("Transformer with Re-Attention", "model", budget),
        ("popularity, exact counts", "popularity", ("none", "")),
    ):
        metrics = accuracy["metrics"][key]["masked"]
        table.add_row(name, _percent(metrics["ndcg@10"]), _percent(metrics["hit@10"]), *cells)
    console = Console()
    console.print(table)
    console.print(statement["headline"], style="bold", highlight=False, markup=False)


def _percent(metric: dict[str, float]) -> str:
    return f"{100 * metric['value']:.1f}%"
