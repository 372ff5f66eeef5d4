"""Interruption: Ctrl-C, SIGTERM and SIGHUP let a run finish its step and save, so that it can be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpformer.errors import DpformerError

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(DpformerError):
    """Ctrl-C, SIGTERM or SIGHUP; the state is saved."""


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Ctrl-C, SIGTERM and SIGHUP (the terminal closed) set the event once.

    A second signal terminates the process immediately, like a kill.
    """
    stop = threading.Event()
    former: dict[int, Any] = {}

    def ask(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, former[number])

    if threading.current_thread() is threading.main_thread():
        former = {number: signal.signal(number, ask) for number in STOPPING}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
