"""The command line. One file per subcommand; each imports torch inside its function, so that --help is instant."""

import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated

import typer

from dpformer import __version__
from dpformer.cli.address_space import check_address_space
from dpformer.cli.audit import audit
from dpformer.cli.calibrate import calibrate
from dpformer.cli.card import card
from dpformer.cli.compare import compare
from dpformer.cli.data import CHOICES, data
from dpformer.cli.demo import demo
from dpformer.cli.doctor import doctor
from dpformer.cli.early import early
from dpformer.cli.epsilon import epsilon
from dpformer.cli.evaluate import evaluate
from dpformer.cli.export import export
from dpformer.cli.generate import generate
from dpformer.cli.ledger import ledger
from dpformer.cli.moments import moments
from dpformer.cli.recommend import recommend
from dpformer.cli.report import report
from dpformer.cli.serve import serve
from dpformer.cli.sign import sign
from dpformer.cli.terminal import plain_output
from dpformer.cli.train import train, with_choices
from dpformer.cli.tune import tune
from dpformer.cli.verify import verify
from dpformer.data.options import READING
from dpformer.errors import DpformerError, out_of_memory
from dpformer.progress import shown

app = typer.Typer(
    name="dpformer",
    help="Train Transformers on private sequences with user-level differential privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dpformer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(epsilon)
app.command()(calibrate)
app.command()(early(with_choices(data, CHOICES)))
app.command()(early(with_choices(train)))
app.command()(early(with_choices(evaluate, READING, essential=())))
app.command()(early(with_choices(recommend, READING, essential=())))
app.command()(early(serve))
app.command()(early(generate))
app.command()(early(export))
app.command()(early(report))
app.command()(early(compare))
app.command()(early(card))
app.add_typer(ledger, name="ledger")
app.command()(moments)
app.command()(audit)
app.command()(early(verify))
app.command()(early(sign))
app.command()(early(with_choices(tune)))
app.command()(demo)
app.command()(doctor)


CRASHED = 3  # an internal error; 1 means a check did not pass, 2 bad input


def main() -> None:
    """Run the command line: bad input is one sentence on stderr and exit code 2, an internal error exit code 3."""
    code = run()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Seen once: a leader that had finished aborted while the interpreter was shutting down around the network
        # threads, and torchrun restarted the finished job. Everything is on disk by now, so nothing needs to be torn
        # down.
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run() -> int:
    """Run the command of `sys.argv` and return its exit code."""
    with plain_output() as output:
        try:
            check_address_space()
            with shown():
                app()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            return output.flushed(code)
        except DpformerError as error:
            return output.sentence(str(error))
        except Exception as error:
            if out_of_memory(error):
                return output.sentence("out of memory; free some, or lower --micro-batch-tokens or --threads")
            if isinstance(error, OSError) and output.broken(error):
                return output.gone(error)
            traceback.print_exc()
            return CRASHED
    return 0
