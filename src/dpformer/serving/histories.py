"""Histories to recommend for: from a log read as in training, from JSON lines, or given in Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data import read
from dpformer.data.histories import Histories
from dpformer.data.interactions import Codes
from dpformer.errors import DpformerError
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
# A minimum number of actions and a time window select training data, not who gets recommendations.
OF_TRAINING: dict[str, Any] = {"min_user_actions": 0, "since": None, "until": None}


def histories_of(pairs: Iterable[tuple[Any, Iterable[Any]]]) -> Histories:
    """Histories from pairs (user id, item ids in order of time), one pair per user."""
    users, items, codes, stops = [], Codes(), [], [0]
    for user, history in pairs:
        if isinstance(history, str | bytes | Mapping):
            raise DpformerError(
                f"the history of {user!r} is {history!r}: give a list of item ids, such as [{history!r}]"
            )
        try:
            codes += [items[item] for item in history]
        except (ValueError, TypeError) as error:  # TypeError: an unhashable id, or a number instead of a list
            raise DpformerError(f"the history of {user!r} holds an invalid item id: {error}") from None
        users.append(str(user))
        stops.append(len(codes))
    return Histories(users, items.names, np.array(codes, dtype=np.int32), np.array(stops, dtype=np.int64))


def reading_config(run: str | Path | None, file: Path | None, **given: Any) -> Config:
    """How another log is read for a run: as in training, except for the given options (`Config.on_file`).

    A model file without its run folder has no settings, so the defaults apply.
    """
    folder = None if run is None or not Path(run).is_dir() else RunFolder(run)
    config = Config.make(folder.config) if folder is not None and folder.config.is_file() else Config.make()
    return config.replace(split="last").on_file(file, **{**OF_TRAINING, **given})


def read_histories(path: Path, run: str | Path | None = None, **given: Any) -> Histories:
    """Users and their histories, oldest first, of a log or of JSON lines {"user_id": …, "history": […]}."""
    if path.suffix.lower() in JSON_SUFFIXES and (found := _json_histories(path)):
        return histories_of(found)
    return read_log(path, reading_config(run, path, **given))


def read_log(path: Path, config: Config) -> Histories:
    """The log at a path, read by a config."""
    return read(path, config.log_columns(), config.reading(), config.filters())


def _json_histories(path: Path) -> list[tuple[str, list[Any]]]:
    """JSON lines of histories; empty if the first line is an interaction."""
    found: list[tuple[str, list[Any]]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DpformerError(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _json(line, path, number)
        if not found and isinstance(row, dict) and "history" not in row:
            return []
        items = row.get("history") if isinstance(row, dict) else row
        if not isinstance(items, list):
            raise DpformerError(f'{path}, line {number} has no list of items under "history"')
        name = row.get("user_id") if isinstance(row, dict) else None
        found.append((str(number if name is None else name), items))
    return found


def _json(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DpformerError(f"{path}, line {number} is not JSON: {error}") from None
