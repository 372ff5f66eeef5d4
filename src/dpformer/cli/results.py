"""Shared by commands that check something: JSON on request, and an exit code that reports the outcome."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(facts: Any) -> None:
    typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))


def conclude(result: Any, show: Callable[[Any], None], as_json: bool) -> None:
    """Print a result with `to_dict` and `passed`; exit code 1 if it did not pass."""
    if as_json:
        print_json(result.to_dict())
    else:
        show(result)
    if not result.passed:
        raise typer.Exit(1)
