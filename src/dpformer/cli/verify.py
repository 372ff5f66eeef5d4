"""`dpformer verify RUN`: check that statement, ledger, config, data and released file agree."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.results import AsJson, conclude
from dpformer.cli.terminal import visible
from dpformer.errors import DpformerError


def verify(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    data: Annotated[
        Path | None, typer.Option(help="The run's data.  [default: its path at training, if the run is your own]")
    ] = None,
    catalog: Annotated[
        Path | None,
        typer.Option(
            help="The run's catalogue, for titles and attributes.  [default: its path at training, if the run is your "
            "own]"
        ),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Public key (PEM, Ed25519) of the expected signer.")] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Repeat the run from its data and --key-file and compare bit for bit (takes as long as training).",
        ),
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(help="For --replay: the file written by dpformer train --key-file.", show_default=False),
    ] = None,
    read_data: Annotated[bool, typer.Option(help="Prepare the data again, if available, and compare.")] = True,
    as_json: AsJson = False,
) -> None:
    """Verify a run: list every claim of its statement and how it was checked, or that it was not.

    Exit code 0 if nothing contradicts the statement, 1 if something does, 2 for bad input, 3 if dpformer itself failed.
    Only --replay shows that training, sampling and noise were what the statement says.
    """
    from dpformer.cli.train import quiet_threads

    quiet_threads()
    from dpformer.statement.signature import public_key
    from dpformer.verification.verify import verify as check

    if replay != (key_file is not None):
        raise DpformerError("--replay and --key-file go together: give both, or neither")
    if key is not None:
        public_key(key)  # an unreadable key is bad input, not a wrong signature
    dataset = _dataset(run, data) if read_data or replay else None
    public = _catalog(run, catalog, follow=read_data) or _public(dataset)
    again = None if key_file is None else _replay(run, data, catalog, dataset, key_file)
    conclude(check(run, dataset=dataset, catalog=public, key=key, replay=again), _print, as_json)


def _replay(run: Path, data: Path | None, catalog: Path | None, dataset: Any, key_file: Path) -> Any:
    """Replay a finished run on the available data."""
    from dpformer.runs.folder import RunFolder
    from dpformer.runs.run import finished, resume
    from dpformer.runs.trust import followed
    from dpformer.verification.replay import Replay

    done = finished(run)
    folder = RunFolder.open(run)
    config = followed(folder, done.config, data)
    if catalog is not None:
        config = config.replace(catalog=catalog.resolve())
    if dataset is None:
        raise DpformerError(f"a replay needs the data of {run}, which was not found: give it with --data")
    for name in ("catalog", "tokenizer"):
        if getattr(done.config, name) is not None and getattr(config, name) is None:
            hint = "give it with --catalog" if name == "catalog" else "replay it where it was made"
            raise DpformerError(f"a replay needs the {name} of {run}, which was not made by you here: {hint}")
    return Replay(folder, config, done.statement, dataset.hash, key_file, resume)


def _dataset(run: Path, data: Path | None) -> Any:
    """The data of a finished run, prepared again; None if it is not available or the run was made by someone else."""
    from dpformer.runs.config import Config
    from dpformer.runs.folder import RunFolder
    from dpformer.runs.model_file import load_release
    from dpformer.runs.tasks import task_of
    from dpformer.runs.trust import NotOwn, followed

    folder = RunFolder.open(run)
    if not folder.done:
        return None
    try:
        config = followed(folder, Config.make(folder.config), data)
        if config.engine == "spark" or (data is None and _missing(config.file)):
            return None
        return task_of(config).read_again(config, load_release(folder.model))
    except NotOwn:
        return None
    except DpformerError:
        if data is not None:
            raise
        return None  # the checks will find and report what is wrong


def _missing(file: Path | None) -> bool:
    """Whether a log is no longer a local file; the target of a URL is only known when it is read."""
    from dpformer.data.sources.urls import url_of

    return file is not None and url_of(file) is None and not file.exists()


def _catalog(run: Path, named: Path | None, *, follow: bool) -> Any:
    """The catalogue given on the command line, or the one of the user's own run if it still exists."""
    from dpformer.data import read_catalog
    from dpformer.runs.config import Config
    from dpformer.runs.folder import RunFolder
    from dpformer.runs.trust import is_own

    if named is not None:
        return read_catalog(named)
    folder = RunFolder.open(run)
    if not follow or not is_own(folder):
        return None
    try:
        path = Config.make(folder.config).catalog
        return read_catalog(path) if path is not None and path.exists() else None
    except DpformerError:
        return None


def _public(dataset: Any) -> Any:
    """The catalogue of the synthetic data set, which is part of the program."""
    made_up = dataset is not None and str(dataset.description.get("source")).startswith("synthetic (seed")
    return dataset.vocabulary if made_up else None


def _print(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    words = {True: "ok", False: "WRONG", None: "not checked"}
    table = Table("", "check", "found", title="Checks", title_justify="left")
    for finding in result.findings:
        table.add_row(words[finding.ok], visible(finding.name), visible(finding.detail))
    console.print(table, markup=False)
    table = Table("claim of the statement", "", title="Claims", title_justify="left")
    for claim in result.claims:
        table.add_row(visible(claim.sentence), visible(claim.how))
    for assumption in result.assumed:
        table.add_row(visible(assumption), "assumed: cannot be checked from a run folder")
    console.print(table, markup=False)
    console.print(f"Statement: {visible(result.headline)}", highlight=False, markup=False)
    console.print(result.verdict, highlight=False, markup=False, style="bold" if result.passed else "bold red")
