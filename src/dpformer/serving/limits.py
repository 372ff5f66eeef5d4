"""Limits of one request and of one connection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    head_seconds: float = 10.0  # from a connection's opening or first byte to the end of the headers
    body_bytes: int = 262_144
    body_seconds: float = 10.0
    drain_seconds: float = 1.0  # time for a retiring worker to answer remaining requests
    stop_seconds: float = 10.0  # after which unfinished requests are aborted
    history: int = 1_000
    id_characters: int = 256
    k: int = 100
    search_characters: int = 100
    rule_items: int = 10_000
    rule_columns: int = 20
    at_once: int = 256  # concurrent requests per worker, beyond which the answer is 503
