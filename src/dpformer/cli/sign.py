"""`dpformer sign RUN --key KEY`: a signature under every published file of a finished run."""

from pathlib import Path
from typing import Annotated

import typer


def sign(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    key: Annotated[Path, typer.Option(help="Private key (PEM, Ed25519).")],
    also: Annotated[
        list[str] | None,
        typer.Option(help="Name of a further file in RUN to publish: report.html, if made with --public; repeatable."),
    ] = None,
) -> None:
    """Sign all files of a run that may be published, card and audit included; sign again after any of them changed.

    The list is RUN/SHA256SUMS, the signature RUN/SHA256SUMS.sig; dpformer verify RUN --key PUBLIC checks them, and so
    do sha256sum and openssl.
    """
    from dpformer.runs.folder import RunFolder
    from dpformer.runs.run import finished
    from dpformer.statement.signature import private_key
    from dpformer.statement.signature import sign as sign_files

    folder, signer = RunFolder(finished(run).folder), private_key(key)
    with folder.lock():
        names = sign_files(folder, signer, also or ())
    typer.echo(f"signed: {', '.join(names)}")
