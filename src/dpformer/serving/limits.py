"""What one request, and one connection, may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    head_seconds: float = 10.0  # from a connection's first byte, or its opening, to the end of the headers
    body_bytes: int = 262_144
    body_seconds: float = 10.0
    drain_seconds: float = 1.0  # in which a worker that retires answers what its connections still ask
    stop_seconds: float = 10.0  # after which what is still in the works is cut off
    history: int = 1_000
    id_characters: int = 256
    k: int = 100
    search_characters: int = 100
    rule_items: int = 10_000
    rule_columns: int = 20
    at_once: int = 256  # requests in the works of a worker, beyond which the answer is 503
