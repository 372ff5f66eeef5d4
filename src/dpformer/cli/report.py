"""`dpformer report RUN`: one HTML page about a run, for engineers and lawyers."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path | None, typer.Option(help="Output file.  [default: RUN/report.html]")] = None,
    history: Annotated[
        list[str] | None, typer.Option(help="Example history to show (comma-separated item ids); may be repeated.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The run's data.  [default: its path at training, if the run is your own]")
    ] = None,
    catalog: Annotated[
        Path | None, typer.Option(help="Catalogue with titles.  [default: the one given at training]")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Only what the guarantee covers, so that the page may be published.")
    ] = False,
) -> None:
    """Write one self-contained HTML page: guarantee, accuracy, curves, long tail, attention, config."""
    from dpformer.cli.rules import split_ids
    from dpformer.report import write_report

    examples = [split_ids(text) for text in history] if history else None
    typer.echo(str(write_report(run, out=out, histories=examples, public=public, data=data, catalog=catalog)))
