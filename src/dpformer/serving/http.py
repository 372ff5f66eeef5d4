"""HTTP by uvicorn, with what it lacks: a time limit for headers, and a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from dpformer.errors import DpformerError
from dpformer.serving.limits import Limits

BACKLOG = 1024  # connections waiting to be accepted
TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Listener(socket.socket):
    """A socket that always listens with `BACKLOG`.

    asyncio accepts as many connections at a time as its backlog. With 1, the workers that share a socket alternate;
    with more, the first one to wake up takes them all.
    """

    def listen(self, backlog: int = BACKLOG, /) -> None:
        super().listen(BACKLOG)


def listening(host: str, port: int) -> Listener:
    """A bound socket, so that a port in use is reported in one sentence and port 0 has a number."""
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        made = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise DpformerError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return Listener(made.family, made.type, made.proto, made.detach())


class Server(uvicorn.Server):
    """Serves an application on a listening socket until SIGTERM.

    On shutdown it first stops accepting, then answers the remaining requests of its connections (announcing that they
    close), and then exits. So a process that takes over on the same socket loses nothing.
    """

    def __init__(self, app: Any, limits: Limits, on_started: Callable[[], object] = lambda: None) -> None:
        super().__init__(uvicorn.Config(app, **settings(limits)))
        self.limits, self.on_started = limits, on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM stops it; Ctrl-C is left to the parent, which stops it in the same way."""
        try:
            before = signal.signal(signal.SIGTERM, self.handle_exit)
        except ValueError:  # in a thread, as in tests, signals cannot be set
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        end = time.monotonic() + self.limits.drain_seconds
        while self.server_state.connections and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


def settings(limits: Limits) -> dict[str, Any]:
    """Settings of uvicorn, whose own access log would hold paths, and so items."""
    return {
        "access_log": False,
        "log_level": "warning",
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": max(1, round(limits.stop_seconds)),
        "server_header": False,
        "ws": "none",
        "backlog": 1,  # see Listener
        "http": _protocol(limits.head_seconds),
    }


def _protocol(seconds: float) -> Any:
    """uvicorn's protocol, with a time limit for headers."""
    if importlib.util.find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
    else:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol  # type: ignore[assignment]

    class Timed(Protocol):
        """Close a connection whose headers are not complete in time, even if they arrive byte by byte."""

        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch_head(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()  # the headers are complete; the body has its own limit
            elif self._late is None:
                self._late = self.loop.call_later(seconds, self._too_late)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _too_late(self) -> None:
            self._late = None
            if not self.transport.is_closing():
                self.transport.write(TOO_LATE)
                self.transport.close()

    return Timed
