"""How much work a stranger's folder may make: what is beyond is not worked out, and so not confirmed.

Accounting takes time with the number of steps, of different events, and towards extreme ε; a model is built from the
sizes that a config names. Everything is bounded here before it is begun; how large files may be, in `files`.
"""

from __future__ import annotations

from typing import Any

from dpformer.accounting.arguments import EPSILONS
from dpformer.kinds import auto
from dpformer.runs.config import Config

MOST_USERS = 10**10  # people there are
MOST_STEPS = 10**6  # some 20 seconds of accounting
MOST_EVENTS = 8  # of which a run has at most five
MOST_RUNS = 10**6  # of tuning, on average


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
    if config.delta is None or config.model == auto.AUTO:
        return "config.toml leaves delta or the model open, which a finished run has decided"
    if not config.kind.trains:
        return ""
    if config.batch_size is None or config.epochs is None:
        return "config.toml leaves open what a finished run has decided (batch_size, epochs)"
    if config.epochs * users > MOST_STEPS * config.batch_size:
        return f"training took more than {MOST_STEPS:,} steps, which is all that is worked out"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
