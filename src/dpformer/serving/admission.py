"""Which requests reach an endpoint: from a known host, with a token if required, of limited size, received in time."""

from __future__ import annotations

import asyncio

from dpformer.serving.access import OPEN_PATHS, Access
from dpformer.serving.guard import App, Message, Receive, Scope, Send, refuse
from dpformer.serving.limits import Limits


class TooLarge(Exception):
    """A body larger than the limit."""


class Admission:
    """Refuse inadmissible requests; pass on the others with their complete body."""

    def __init__(self, app: App, limits: Limits, access: Access) -> None:
        self.app, self.limits, self.access = app, limits, access
        self.working = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.working += 1
        try:
            await self._admit(scope, receive, send)
        finally:
            self.working -= 1

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if self.working > self.limits.at_once:
            await refuse(send, 503, f"more than {self.limits.at_once} requests at once: try again later")
            return
        if not self.access.knows_host(headers.get(b"host", b"")):
            await refuse(send, 400, "unknown Host name: see --allow-host")
            return
        if scope["path"] not in OPEN_PATHS and not self.access.knows_token(headers.get(b"authorization", b"")):
            await refuse(send, 401, "a bearer token is required", (b"www-authenticate", b"Bearer"))
            return
        try:
            body = await asyncio.wait_for(self._body(headers, receive), self.limits.body_seconds)
        except TooLarge:
            await refuse(send, 413, f"the body is larger than {self.limits.body_bytes:,} bytes")
            return
        except asyncio.TimeoutError:  # a separate class before Python 3.11
            await refuse(send, 408, f"the body took longer than {self.limits.body_seconds:g} seconds")
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        announced = headers.get(b"content-length", b"0")
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
