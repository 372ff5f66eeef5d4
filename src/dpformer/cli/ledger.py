"""`dpformer ledger FILE`: one budget for a data set over many runs; make it, or see what is spent."""

from pathlib import Path
from typing import Annotated

import typer

from dpformer.cli.results import AsJson, print_json
from dpformer.errors import DpformerError


def ledger(
    file: Annotated[Path, typer.Argument(help="The ledger.")],
    epsilon: Annotated[float | None, typer.Option(help="Make it: ε of all runs together.", show_default=False)] = None,
    delta: Annotated[float | None, typer.Option(help="Make it: δ of all runs together.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show the budget of a data set and the runs that spent it; with --epsilon and --delta, make a new one.

    `dpformer train --ledger FILE` writes each run down before it releases anything, or refuses it.
    """
    from dpformer.format_number import plain, round_up
    from dpformer.runs import ledger_file

    if (epsilon is None) != (delta is None):
        raise DpformerError("a budget needs both --epsilon and --delta")
    if epsilon is not None and delta is not None:
        budget = ledger_file.create(file, epsilon, delta)
    else:
        budget = ledger_file.read(file)
    if as_json:
        print_json({**budget.to_dict(), "spent": budget.spent})
        return
    typer.echo(f"ε {round_up(budget.spent)} of {plain(budget.epsilon)} is spent, at δ = {budget.delta:g}")
    for run in budget.runs:
        typer.echo(f"{run['started']}  {run['run']}")
