"""The command line. One file a subcommand; each imports torch inside, so that --help is instant."""

import sys

import typer

from dpformer.cli.data import data
from dpformer.errors import DpformerError

app = typer.Typer(
    name="dpformer",
    help="Train Transformers on private sequences with user-level differential privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.callback()(lambda: None)  # also with one subcommand, its name has to be given
app.command()(data)


def main() -> None:
    """Runs the command line; bad input is one sentence on stderr and exit code 2."""
    try:
        app()
    except DpformerError as error:
        typer.echo(f"dpformer: {error}", err=True)
        sys.exit(2)
