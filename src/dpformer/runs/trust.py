"""Whether this user made a run folder on this machine: only then are the paths in its config followed by default.

A run folder names files: the log, a catalogue, a folder for prepared data. In the user's own folder that is convenient:
`dpformer evaluate RUN` finds its data. In a folder from someone else it is a trap: its report would show rows of any
file named there, and prepared private data would be written wherever its author wants.

So a run is marked as the user's own by a code that only this user can make: HMAC-SHA256 of the options in config.toml
under a secret in the user's state folder ($XDG_STATE_HOME/dpformer/owner, readable by the user alone). The secret never
leaves the machine. Where it cannot be stored, folders are not marked, and the data must be given. The section
[deployment] is not covered: it is written later, and names no file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
from pathlib import Path
from typing import Any

from dpformer.errors import DpformerError
from dpformer.files import read_text, write_text
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BYTES = 32


def mark_as_own(folder: RunFolder) -> None:
    """Mark a new folder; if the secret cannot be stored, it stays unmarked."""
    secret = _secret(make=True)
    code = None if secret is None else _code(folder, secret)
    if code is not None:
        write_text(folder.owner, code + "\n")


def is_own(folder: RunFolder) -> bool:
    """Whether this user made the folder, and the options in config.toml are unchanged."""
    secret = _secret(make=False)
    code = None if secret is None or not folder.owner.is_file() else _code(folder, secret)
    if code is None:
        return False
    with folder.owner.open("rb") as file:
        return hmac.compare_digest(file.read(100).strip(), code.encode())


def followed(folder: RunFolder, config: Config, data: Path | None = None, **reading: Any) -> Config:
    """The config with the paths that may be followed: those of the user's own run, and those given explicitly.

    Args:
        folder: the run.
        config: of the run.
        data: the log to read; by default the run's log, if the run is the user's own.
        reading: reading options that differ from training (`Config.on_file`).
    """
    if is_own(folder):
        pinned = config if data is not None else at_snapshot(folder, config)
        return pinned if data is None and not reading else pinned.on_file(data or config.file, **reading)
    if data is None and not config.synthetic:
        name = config.file.name if config.file is not None else config.table or "a query"
        raise NotOwn(
            f"{folder.path} was not made by you on this machine, or its config.toml has changed, so the file that it "
            f"names is not read: give its data, {name!r} there (as DATA after the run, or with --data)"
        )
    return config.on_file(data, **reading).replace(catalog=None, tokenizer=None, cache=None)


def at_snapshot(folder: RunFolder, config: Config) -> Config:
    """The config with the state of a table that the run was trained on, which need not be the current one any more."""
    if config.snapshot is not None or not folder.data.is_file():
        return config
    snapshot = folder.read_json(folder.data).get("snapshot")
    return config if snapshot is None else config.replace(snapshot=str(snapshot))


class NotOwn(DpformerError):
    """Files named by someone else's run folder are not read."""


def _code(folder: RunFolder, secret: bytes) -> str | None:
    """The code of a config without [deployment]; None if it cannot be read."""
    try:
        choices = tomllib.loads(read_text(folder.config))
        choices.pop("deployment", None)
        text = json.dumps(choices, sort_keys=True, default=repr)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        return None
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _secret(*, make: bool) -> bytes | None:
    """The user's secret; None if there is none and none can be created."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state) / "dpformer" / "owner"
    try:
        if make and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(os.urandom(BYTES))
        secret = path.read_bytes()
    except FileExistsError:  # another process created it meanwhile
        return _secret(make=False)
    except OSError:
        return None
    return secret if len(secret) == BYTES else None
