"""In front of every endpoint: small bodies only, security headers, metrics by route, and errors that tell nothing.

Plain ASGI, for it runs at every request. What a history holds must not reach a log: there is no access log, and of an
error only its type and place are written down, never its message, which may quote the input.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dpformer.serving.served import Limits, Served

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
log = logging.getLogger("dpformer.serving")


class Meters:
    """What Prometheus reads. Labels are routes and status codes: nothing of what was asked."""

    def __init__(self, served: Served) -> None:
        self.registry = CollectorRegistry()
        names = ("route", "status")
        self.requests = Counter("dpformer_requests", "Requests.", names, registry=self.registry)
        self.seconds = Histogram(
            "dpformer_request_seconds", "Time to answer.", ("route",), buckets=SECONDS, registry=self.registry
        )
        self.working = Gauge("dpformer_requests_in_progress", "Requests in the works.", registry=self.registry)
        self.unknown = Counter("dpformer_unknown_items", "Items of histories left out.", registry=self.registry)
        facts = Gauge("dpformer_model_epsilon", "ε of the model; +Inf: not private.", registry=self.registry)
        epsilon = served.statement["epsilon"] if served.statement["private"] else None
        facts.set(float("inf") if epsilon is None else epsilon)
        Gauge("dpformer_model_items", "Items of the model.", registry=self.registry).set(served.ranker.num_items)


class TooLarge(Exception):
    """A body beyond the limit."""


class Guard:
    """The outermost layer of the service."""

    def __init__(self, app: App, meters: Meters, limits: Limits) -> None:
        self.app, self.meters, self.limits = app, meters, limits
        self.working = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, started = time.perf_counter(), 500, False

        async def answer(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        self.working += 1
        self.meters.working.set(self.working)
        try:
            await self._admit(scope, receive, answer)
        except Exception as error:
            log.error("%s in %s", type(error).__name__, _place(error))
            if not started:
                await _refuse(answer, 500, "internal error; its kind is in the log of the server")
        finally:
            self.working -= 1
            self.meters.working.set(self.working)
            route = getattr(scope.get("route"), "path", "other")
            self.meters.requests.labels(route, str(status)).inc()
            self.meters.seconds.labels(route).observe(time.perf_counter() - began)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.working > self.limits.at_once:
            await _refuse(send, 503, f"more than {self.limits.at_once} requests at once: try again later")
            return
        try:
            body = await asyncio.wait_for(self._body(scope, receive), self.limits.body_seconds)
        except TooLarge:
            await _refuse(send, 413, f"the body is larger than {self.limits.body_bytes:,} bytes")
            return
        except asyncio.TimeoutError:  # not the same before Python 3.11
            await _refuse(send, 408, f"the body took longer than {self.limits.body_seconds:g} seconds")
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self.limits.body_bytes:
            raise TooLarge
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.limits.body_bytes:
                raise TooLarge
            if not message.get("more_body", False):
                return b"".join(parts)


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = f'{{"detail":"{reason}"}}'.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _place(error: Exception) -> str:
    """File and line, without a word of the message."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
