"""`dpformer compare RUN RUN …`: budgets, accuracy and settings of runs, side by side on one page."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.results import AsJson, print_json

PAGE = "comparison.html"


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run folders; the first is the reference.")],
    out: Annotated[
        Path | None, typer.Option(help=f"Output file.  [default: {PAGE}; with --json none]", show_default=False)
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Only what the guarantee covers, so that the page may be published.")
    ] = False,
    allow_seen: Annotated[
        bool,
        typer.Option(
            "--allow-seen", help="Measure as `recommend --allow-seen`: items of the history may be recommended."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: budgets, accuracy with intervals, settings that differ, and the total cost of all of them.

    Where runs were tested on the same held-out items, differences to the first run are paired by user. Exact accuracy
    is not covered by ε.
    """
    from dpformer.report import compare as compared
    from dpformer.report import write_comparison

    comparison = compared(runs, public=public, filter_seen=not allow_seen)
    page = out or (None if as_json else Path(PAGE))
    if page is not None:
        write_comparison(comparison, page)
    if as_json:
        print_json(comparison.to_dict())
        return
    _print(comparison)
    typer.echo(str(page))


def _print(comparison: Any) -> None:
    from rich.console import Console

    from dpformer.format_number import round_up, small
    from dpformer.report.comparison_page import accuracies, budgets

    console, sides = Console(), comparison.sides
    _table(console, "Budgets", sides, budgets(sides))
    if together := comparison.together:
        cost = f"ε = {round_up(together['epsilon'])} at δ = {small(together['delta'])}"
        console.print(f"All runs together, if they share users: {cost}", highlight=False)
    else:
        console.print("No guarantee holds for all runs together, because one has none.", highlight=False)
    if not comparison.public:
        _print_accuracy(console, comparison, accuracies(sides))
    settings = [(name, [_shown(v) for v in values]) for name, values in comparison.settings.items()]
    _table(console, "Settings that differ", sides, settings)


def _print_accuracy(console: Any, comparison: Any, rows: list[tuple[str, list[dict[str, float] | None]]]) -> None:
    from dpformer.report.comparison import NOTE

    sides = comparison.sides
    if rows:
        of = "seen items excluded" if comparison.filter_seen else "all items ranked"
        cells = [(name, [_interval(value) for value in values]) for name, values in rows]
        _table(console, f"Accuracy on held-out test items ({of})", sides, cells)
    if comparison.differences:
        names = comparison.differences[0]
        cells = [(n.upper(), ["–", *(_interval(one[n], "+") for one in comparison.differences)]) for n in names]
        _table(console, f"Difference to {sides[0].name}, paired by user", sides, cells)
    if comparison.same_test is False:
        words = "Warning: the runs were measured on different held-out items, so their numbers are not comparable."
        console.print(words, style="bold red", highlight=False)
    for side in sides:
        if side.no_accuracy:
            console.print(f"{side.name} was not measured: {side.no_accuracy}.", highlight=False, markup=False)
    console.print(NOTE, style="yellow", highlight=False)


def _table(console: Any, title: str, sides: Any, rows: list[tuple[str, list[str]]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("", *(escape(side.name) for side in sides), title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in rows:
        table.add_row(name, *map(escape, values))
    console.print(table)


def _interval(metric: dict[str, float] | None, sign: str = "") -> str:
    if metric is None:
        return "–"
    value = f"{metric['value']:{sign}.4f}"
    return f"{value} ({metric['low']:{sign}.4f} … {metric['high']:{sign}.4f})" if "low" in metric else value


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)
