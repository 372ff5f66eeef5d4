"""How a command reads a log for a run: as training did, except for options given on the command line.

The options themselves are those of `dpformer train` (`with_choices(command, READING)`).
"""

from typing import Annotated, Any

import typer

Unfiltered = Annotated[
    bool, typer.Option("--unfiltered", help="Read all interactions of the log, ignoring the filters of training.")
]


def reading_of(choices: dict[str, Any], unfiltered: bool = False) -> dict[str, Any]:
    """The given options, as arguments of `Config.on_file`."""
    given = {name: value for name, value in choices.items() if value is not None}
    return {**given, "unfiltered": True} if unfiltered else given
