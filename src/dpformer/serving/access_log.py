"""One JSON line per request: route, status and time, but neither request contents nor client addresses."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import datetime, timezone
from pathlib import Path

from dpformer.errors import DpformerError

STDOUT = "-"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class AccessLog:
    """Lines of `{"time", "method", "route", "status", "ms", "bytes", "worker", "request_id"}`.

    The route is that of the endpoint table (`/similar/{item_id}`), never the path. A line is one write to a file opened
    for appending, so that several workers can share it.
    """

    def __init__(self, target: str | Path) -> None:
        self._own = str(target) != STDOUT
        try:
            self._file = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if self._own else 1
        except OSError as error:
            raise DpformerError(f"{target} cannot be written: {error.strerror}") from None

    def write(
        self, method: str, route: str, status: int, seconds: float, size: int, request_id: str | None = None
    ) -> None:
        """Add a line; a full disk must not stop the service."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        facts = {
            "time": now,
            "method": method if method in METHODS else "other",
            "route": route,
            "status": status,
            "ms": round(1000 * seconds, 3),
            "bytes": size,
            "worker": os.getpid(),
        }
        if request_id is not None:
            facts["request_id"] = request_id
        try:
            os.write(self._file, json.dumps(facts).encode() + b"\n")
        except OSError as error:
            print(f"dpformer: the access log cannot be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        if self._own:
            os.close(self._file)


METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


def request_id_of(header: bytes) -> str | None:
    """The id that a proxy gave a request (`X-Request-ID`), if it is a short plain word."""
    return header.decode() if REQUEST_ID.fullmatch(header) else None
