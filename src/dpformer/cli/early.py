"""Missing files, and logs with a wrong header or first row, are refused before torch is imported, which takes seconds.

The commands check again, and more, when they open a file; this is only about the time until the common mistake is
reported.
"""

from __future__ import annotations

import functools
import glob
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from dpformer.data.options import DataOptions
from dpformer.errors import DpformerError
from dpformer.runs.config_file import read_toml, without_removed

RUNS = ("run", "runs", "resume")
MOST_BYTES = 1 << 26  # of a log: unpacking and scanning a larger one twice costs more than torch
FILES = ("file", "data", "histories", "catalog")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]+:/")  # a URL, as a Path


def early(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which first refuses run folders and input files that do not exist."""

    @functools.wraps(command)
    def checked(**values: Any) -> None:
        for name in (*RUNS, *FILES) if not values.get("dry_run") else ():  # which opens none
            given = values.get(name)
            paths: Iterable[Any] = given if isinstance(given, list) else [given]
            for path in paths:
                if isinstance(path, Path) and not _there(path):
                    raise DpformerError(f"{path} {'is not a run folder: it ' * (name in RUNS)}does not exist")
        command(**values)

    return checked


def first_look(given: dict[str, Any], config: Path | None) -> None:
    """Refuse a log on this machine for its options, its header or its first rows, with DuckDB alone.

    Args:
        given: options of a command.
        config: a TOML file with others.
    """
    toml = {} if config is None else without_removed(read_toml(config))
    own = {name: value for name, value in {**toml, **given}.items() if name in DataOptions.model_fields}
    try:
        options = DataOptions(**own)
        if options.file is None or options.task != "recommend" or options.engine == "spark":
            return
        options.check_data()
    except DpformerError:
        raise
    except ValueError:
        return  # `Config` names the option
    file = options.file
    if file.name != "-" and file.is_file() and file.stat().st_size <= MOST_BYTES and options.query is None:
        from dpformer.data.log import refuse_early
        from dpformer.runs.signals import stop_requested

        with stop_requested() as stop:  # a look is short; its temporary folders go first
            refuse_early(file, options.log_columns(), options.reading(), options.filters())
        if stop.is_set():
            raise KeyboardInterrupt


@contextmanager
def or_exit() -> Iterator[None]:
    """After Ctrl-C, SIGTERM or SIGHUP: temporary files are removed, a sentence is printed, and the exit code is 130."""
    from dpformer.runs.signals import interruptible

    try:
        with interruptible():
            yield
    except KeyboardInterrupt:
        typer.echo("dpformer: interrupted; the last checkpoint is intact", err=True)
        raise typer.Exit(130) from None


def _there(path: Path) -> bool:
    if path.name == "-" or ELSEWHERE.match(str(path)):
        return True
    try:
        return path.exists() or bool(glob.glob(str(path), recursive=True))
    except (OSError, ValueError):
        return True  # for the command to refuse
