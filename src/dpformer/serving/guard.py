"""Around every endpoint: security headers, metrics by route, the access log, and errors that reveal nothing.

Plain ASGI, because it runs for every request. The contents of a history must not reach a log: the access log has
routes, not paths, and for an error only its type and location are logged, never its message, which may quote the input.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dpformer.serving.access_log import AccessLog, request_id_of
from dpformer.serving.served import Served

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # the folder of files in which several workers count
log = logging.getLogger("dpformer.serving")


class Meters:
    """Metrics for Prometheus. Labels are routes and status codes: nothing about request contents.

    Several workers count in files that they share (`PROMETHEUS_MULTIPROC_DIR`), so that each can report the sum.
    """

    def __init__(self, served: Served) -> None:
        self.registry = registry = CollectorRegistry()
        names = ("route", "status")
        self.requests = Counter("dpformer_requests", "Requests.", names, registry=registry)
        self.seconds = Histogram(
            "dpformer_request_seconds", "Time to answer.", ("route",), buckets=SECONDS, registry=registry
        )
        self.working = _gauge("dpformer_requests_in_progress", "Requests in progress.", registry, "livesum")
        self.unknown = Counter("dpformer_unknown_items", "Unknown items in histories.", registry=registry)
        epsilon = served.statement["epsilon"] if served.statement["private"] else None
        facts = (
            ("dpformer_model_epsilon", "ε of the model; +Inf: not private.", epsilon),
            ("dpformer_model_items", "Items of the model.", served.ranker.num_items),
            ("dpformer_model_opened_seconds", "Unix time at which the model was opened.", served.opened.timestamp()),
        )
        for name, text, value in facts:
            gauge = _gauge(name, text, registry, "livemostrecent")
            gauge.set(float("inf") if value is None else value)

    def text(self) -> bytes:
        """All counts, over all workers."""
        if SHARED not in os.environ:
            return generate_latest(self.registry)
        from prometheus_client.multiprocess import MultiProcessCollector

        together = CollectorRegistry()
        MultiProcessCollector(together)
        return generate_latest(together)


def _gauge(name: str, text: str, registry: CollectorRegistry, mode: Any) -> Gauge:
    return Gauge(name, text, registry=registry, multiprocess_mode=mode)


class Guard:
    """The outermost layer of the service."""

    def __init__(self, app: App, meters: Meters, access_log: AccessLog | None = None) -> None:
        self.app, self.meters, self.access_log = app, meters, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, started, size = time.perf_counter(), 500, False, 0

        async def answer(message: Message) -> None:
            nonlocal status, started, size
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                message["headers"] = [*message.get("headers", []), *HEADERS]
            else:
                size += len(message.get("body", b""))
            await send(message)

        self.meters.working.inc()
        try:
            await self.app(scope, receive, answer)
        except Exception as error:
            log.error("%s in %s", type(error).__name__, _place(error))
            if not started:
                await refuse(answer, 500, "internal error; its type is in the server log")
        finally:
            self.meters.working.dec()
            self._count(scope, status, time.perf_counter() - began, size)

    def _count(self, scope: Scope, status: int, seconds: float, size: int) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self.meters.requests.labels(route, str(status)).inc()
        self.meters.seconds.labels(route).observe(seconds)
        if self.access_log is not None:
            given = dict(scope["headers"]).get(b"x-request-id", b"")
            self.access_log.write(scope["method"], route, status, seconds, size, request_id_of(given))


async def refuse(send: Send, status: int, reason: str, *headers: tuple[bytes, bytes]) -> None:
    """Answer with a reason, as JSON."""
    body = json.dumps({"detail": reason}).encode()
    usual = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*usual, *headers]})
    await send({"type": "http.response.body", "body": body})


def _place(error: Exception) -> str:
    """File and line, without the message."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
