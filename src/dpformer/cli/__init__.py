"""The command line. One file a subcommand; each imports torch inside, so that --help is instant."""

import sys

import typer

from dpformer.cli.audit import audit
from dpformer.cli.calibrate import calibrate
from dpformer.cli.data import CHOICES, data
from dpformer.cli.demo import demo
from dpformer.cli.evaluate import evaluate
from dpformer.cli.export import export
from dpformer.cli.generate import generate
from dpformer.cli.moments import moments
from dpformer.cli.recommend import recommend
from dpformer.cli.report import report
from dpformer.cli.serve import serve
from dpformer.cli.train import train, with_choices
from dpformer.cli.tune import tune
from dpformer.cli.verify import verify
from dpformer.errors import DpformerError

app = typer.Typer(
    name="dpformer",
    help="Train Transformers on private sequences with user-level differential privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.callback()(lambda: None)  # also with one subcommand, its name has to be given
app.command()(calibrate)
app.command()(with_choices(data, CHOICES))
app.command()(with_choices(train))
app.command()(evaluate)
app.command()(recommend)
app.command()(serve)
app.command()(generate)
app.command()(export)
app.command()(report)
app.command()(moments)
app.command()(audit)
app.command()(verify)
app.command()(with_choices(tune))
app.command()(demo)


def main() -> None:
    """Runs the command line; bad input is one sentence on stderr and exit code 2."""
    try:
        app()
    except DpformerError as error:
        typer.echo(f"dpformer: {error}", err=True)
        sys.exit(2)
