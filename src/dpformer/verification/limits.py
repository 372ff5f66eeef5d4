"""How much work a stranger's folder may make: what is beyond is not worked out, and so not confirmed.

Accounting takes time with the number of steps, of different events, and towards extreme ε; a model is built from the
sizes that a config names; a named pipe never ends. Everything is bounded here before it is begun.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from dpformer.privacy.arguments import EPSILONS
from dpformer.runs.config import Config

MOST_USERS = 10**10  # people there are
MOST_STEPS = 10**6  # some 20 seconds of accounting
MOST_EVENTS = 8  # of which a run has at most five
MOST_RUNS = 10**6  # of tuning, on average
MOST_BYTES = 2**22  # of JSON or TOML
MOST_METRICS = 2**30


def beyond(config: Config, facts: dict[str, Any]) -> str:
    """Why this is not worked out; nothing if it can be."""
    users, events = facts.get("users"), facts.get("events")
    if type(users) is not int or not 1 <= users <= MOST_USERS:
        return f"users is {_short(users)}; it must be a whole number up to {MOST_USERS:,}"
    if not isinstance(events, list) or len(events) > MOST_EVENTS:
        return f"the ledger holds more than {MOST_EVENTS} events, or is no list"
    if not isinstance(facts.get("hashes"), dict) or not isinstance(facts.get("versions"), dict):
        return "the statement has no hashes or no versions"
    if config.private and not EPSILONS[0] <= config.epsilon <= EPSILONS[1]:
        return f"ε = {config.epsilon:g} is outside {EPSILONS[0]:g} to {EPSILONS[1]:g}, which is all that is worked out"
    if config.delta is None or config.model == "auto":
        return "config.toml leaves delta or the model open, which a finished run has decided"
    if config.model == "counts":
        return ""
    if config.batch_size is None or config.epochs is None:
        return "config.toml leaves open what a finished run has decided (batch_size, epochs)"
    if config.epochs * users > MOST_STEPS * config.batch_size:
        return f"training took more than {MOST_STEPS:,} steps, which is all that is worked out"
    return ""


def regular(path: Path, most: int = MOST_BYTES) -> str:
    """Why a file is not read; nothing if it is a plain file of a usual size. A named pipe would be read for ever."""
    try:
        found = path.stat()
    except OSError as error:
        return f"{path.name} is not here" if isinstance(error, FileNotFoundError) else f"{path.name}: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{path.name} is not a file"
    return f"{path.name} is larger than {most:,} bytes" if found.st_size > most else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
