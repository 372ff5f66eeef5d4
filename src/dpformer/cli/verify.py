"""`dpformer verify RUN`: whether statement, ledger, config, data and released file hold together."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.results import AsJson, conclude
from dpformer.errors import DpformerError


def verify(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    read_data: Annotated[bool, typer.Option(help="Prepare the data again and compare it, if it is there.")] = True,
    as_json: AsJson = False,
) -> None:
    """Verify a run: ε from its ledger again, settings against the config, the released file, hashes.

    Exit code 1 if something does not hold.
    """
    from dpformer.cli.train import quiet_threads

    quiet_threads()
    from dpformer.verification.verify import verify as check

    result = check(run, dataset=_dataset(run) if read_data else None)
    conclude(result, _print, as_json)


def _dataset(run: Path) -> Any:
    """The data of a finished run prepared again, None if it is not there."""
    from dpformer.data import Vocabulary
    from dpformer.runs.config import Config
    from dpformer.runs.folder import RunFolder
    from dpformer.runs.model_file import load_release
    from dpformer.runs.network import load_dataset

    folder = RunFolder.open(run)
    if not folder.done:
        return None
    try:
        config = Config.make(folder.config)
        if config.file is not None and not config.file.exists():
            return None
        if not config.private_vocabulary:
            return load_dataset(config)
        # A private vocabulary was drawn once; with it the data is prepared without drawing again.
        release = load_release(folder.model)
        ids = [str(name) for name in release.vocabulary]
        return load_dataset(config, vocabulary=Vocabulary(ids, release.titles, "dp"))
    except DpformerError:
        return None  # what is wrong with them is found again, and said, by the checks


def _print(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "what", "found", title="Verification", title_justify="left")
    words = {True: "ok", False: "WRONG", None: "–"}
    for finding in result.findings:
        table.add_row(words[finding.ok], finding.name, finding.detail)
    console.print(table)
    console.print(f"The run states: {result.headline}", highlight=False)
    verdict = "Everything that was looked at holds." if result.passed else "This run does NOT hold what it states."
    console.print(verdict, style="bold" if result.passed else "bold red")
