"""`config.toml`: reading, writing of values, and errors as one sentence."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dpformer.errors import DpformerError
from dpformer.files import read_text
from dpformer.statement.deployment import sentence

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Options of earlier versions that did not help, with the value that has no effect: runs with it can still be read.
REMOVED: dict[str, Any] = {"row_exponent": None, "reattention_error": "gradient"}


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file."""
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DpformerError(f"{path} is not TOML: {error}") from None


def without_removed(given: dict[str, Any]) -> dict[str, Any]:
    """The options without removed ones, which are refused unless they had no effect."""
    for name, without_effect in REMOVED.items():
        if given.get(name, without_effect) != without_effect:
            raise DpformerError(f"{name} was removed, because it did not help: use an earlier version of dpformer")
    return {name: value for name, value in given.items() if name not in REMOVED}


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that was probably meant: the first one with this prefix, otherwise the most similar one."""
    names = list(known)
    beginning = [other for other in names if other.startswith(name)]
    return [*beginning, *difflib.get_close_matches(name, names, n=1, cutoff=0)][0]


def one_sentence(error: ValidationError) -> str:
    """The first error of a validation as one sentence."""
    first = error.errors()[0]
    if not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    if first["loc"][0] == "deployment":
        return sentence(error)
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("Input ")
    return f"{first['loc'][0]} is {first['input']!r}; it must be {wanted}"


def toml_value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    # A JSON string is a TOML string, except for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
