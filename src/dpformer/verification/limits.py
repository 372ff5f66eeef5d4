"""Limits on the work that an untrusted folder can cause: anything beyond is not computed, and so not confirmed.

Accounting takes time with the number of steps, of different events, and for extreme ε; a model is built with the
sizes that a config names. Everything is bounded here before it starts; the sizes of files, in `files`.
"""

from __future__ import annotations

from typing import Any

from dpformer.accounting.arguments import EPSILONS
from dpformer.kinds import auto
from dpformer.runs.config import Config

MOST_USERS = 10**10  # more than there are people
MOST_STEPS = 10**6  # some 20 seconds of accounting
MOST_EVENTS = 8  # a run has at most five
MOST_RUNS = 10**6  # expected runs of tuning


def beyond(config: Config, facts: dict[str, Any]) -> str:
    """Why the folder is not checked; empty if it can be."""
    users, events = facts.get("users"), facts.get("events")
    if type(users) is not int or not 1 <= users <= MOST_USERS:
        return f"users is {_short(users)}; it must be an integer up to {MOST_USERS:,}"
    if not isinstance(events, list) or len(events) > MOST_EVENTS:
        return f"the ledger holds more than {MOST_EVENTS} events, or is not a list"
    if not isinstance(facts.get("hashes"), dict) or not isinstance(facts.get("versions"), dict):
        return "the statement has no hashes or no versions"
    if config.private and not EPSILONS[0] <= config.epsilon <= EPSILONS[1]:
        return f"ε = {config.epsilon:g} is outside the supported range {EPSILONS[0]:g} to {EPSILONS[1]:g}"
    if config.delta is None or config.model == auto.AUTO:
        return "config.toml does not set delta or the model, although the run is finished"
    if not config.kind.trains:
        return ""
    if config.batch_size is None or config.epochs is None:
        return "config.toml does not set batch_size or epochs, although the run is finished"
    if config.epochs * users > MOST_STEPS * config.batch_size:
        return f"training took more than the supported {MOST_STEPS:,} steps"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
