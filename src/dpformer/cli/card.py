"""`dpformer card RUN`: the promises of a released model in the formats that others read."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer


def card(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    opendp: Annotated[
        bool,
        typer.Option("--opendp", help="Write an entry for OpenDP's registry of deployments instead of a model card."),
    ] = False,
    dpia: Annotated[
        bool,
        typer.Option("--dpia", help="Write a one-page summary for a data protection officer, with blanks to fill in."),
    ] = False,
    deployment: Annotated[
        Path | None,
        typer.Option(help="TOML file with a section \\[deployment].  \\[default: the one given at training]"),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The ledger that counts this run, to state the remaining budget.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output file.  \\[default: RUN/README.md, opendp.yaml or dpia.md]")
    ] = None,
) -> None:
    """Write a model card (Hugging Face), an entry for OpenDP's registry of deployments, or an impact-assessment page.

    All are made from the privacy statement and from what only you can supply: name, curator, description, intended_use,
    date, data_period, ids_are_persons, access, justification and others, in the section \\[deployment] of a TOML file.
    """
    from dpformer.errors import DpformerError
    from dpformer.files import write_text
    from dpformer.runs.folder import RunFolder
    from dpformer.runs.ledger_file import budget_left
    from dpformer.runs.run import finished
    from dpformer.statement.cards import CardSource, assessment, model_card, registry_entry
    from dpformer.statement.deployment import Deployment
    from dpformer.statement.signature import outdated

    if opendp and dpia:
        raise DpformerError("--opendp and --dpia exclude each other: give one at a time")
    made: Callable[..., str] = model_card
    name = "README.md"
    if opendp or dpia:
        made, name = (registry_entry, "opendp.yaml") if opendp else (assessment, "dpia.md")
    said = None if deployment is None else Deployment.read(deployment)
    source = CardSource.of(finished(run), said, "" if ledger is None else budget_left(ledger, run))
    path = out or run / name
    write_text(path, made(source))
    typer.echo(str(path))
    if out is None and (note := outdated(RunFolder(run))):
        typer.echo(note, err=True)
