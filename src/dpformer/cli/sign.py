"""`dpformer sign RUN --key KEY`: sign every published file of a finished run."""

from pathlib import Path
from typing import Annotated

import typer


def sign(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    key: Annotated[Path, typer.Option(help="Private key (PEM, Ed25519).")],
    also: Annotated[
        list[str] | None,
        typer.Option(help="Further file in RUN to publish, such as report.html made with --public; may be repeated."),
    ] = None,
) -> None:
    """Sign all files of a run that may be published, including card and audit; sign again after any of them changes.

    The list is RUN/SHA256SUMS and the signature RUN/SHA256SUMS.sig; dpformer verify RUN --key PUBLIC checks them, as do
    sha256sum and openssl.
    """
    from dpformer.runs.folder import RunFolder
    from dpformer.runs.run import finished
    from dpformer.statement.signature import private_key
    from dpformer.statement.signature import sign as sign_files

    folder, signer = RunFolder(finished(run).folder), private_key(key)
    with folder.lock():
        names = sign_files(folder, signer, also or ())
    typer.echo(f"signed: {', '.join(names)}")
