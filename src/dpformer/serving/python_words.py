"""Error messages for Python callers: `skip_bad_rows=True`, not `--skip-bad-rows`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from dpformer.errors import DpformerError
from dpformer.kinds.registry import KINDS
from dpformer.runs.config import Config

P = ParamSpec("P")
R = TypeVar("R")

_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?: (?P<value>'[^']*'|\"[^\"]*\"|[\w,.]+))?")
_SAID = {"allow_seen": "filter_seen=False", "unfiltered": 'reading={"unfiltered": True}'}
# Options whose value may follow in a sentence; after others, the next word belongs to the sentence.
_VALUED = {
    "order": ("file", "time"),
    "columns": ("user,item,timestamp", "user,items"),
    "format": ("tsv",),
    "encoding": ("utf-16",),
    "unknown": ("report", "ignore", "error"),
    "engine": ("duckdb", "spark"),
    "where": ("''",),
}


def python_words(sentence: str) -> str:
    """The sentence with command-line options written as Python arguments."""

    def argument(match: re.Match[str]) -> str:
        name, value = match["name"].replace("-", "_"), match["value"]
        rest = "" if value is None else f" {value}"
        field = Config.model_fields.get(name) or Config.model_fields.get(name.removeprefix("no_"))
        if name in _SAID:
            return _SAID[name] + rest
        if field is not None and isinstance(field.default, bool):
            return f"{name.removeprefix('no_')}={not name.startswith('no_')}{rest}"
        values = KINDS if name == "model" else _VALUED.get(name, ())
        if value is not None and value in values:
            return f'{name}="{value.strip(chr(39))}"'
        return f"{name}={rest}"

    return _OPTION.sub(argument, sentence)


def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a method of the Python API: its errors name arguments, and refer to the given frame."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except DpformerError as error:
            error.args = (python_words(re.sub(r"\S*frame\.parquet", "the frame", str(error))),)
            raise

    return call


def public(cls: Any) -> Any:
    """Wrap all public methods of a class in `in_python`."""
    for name, value in list(vars(cls).items()):
        if callable(value) and not name.startswith("_"):
            setattr(cls, name, in_python(value))
    return cls
