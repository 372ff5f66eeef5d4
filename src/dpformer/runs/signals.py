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
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that temporary files are removed.

    A signal that the process ignores (`nohup`) stays ignored.
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    changed: list[int] = []
    if threading.current_thread() is threading.main_thread():
        changed = [number for number in STOPPING if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Ctrl-C, SIGTERM and SIGHUP (the terminal closed) set the event once.

    A second signal has the effect that it had outside of this context.
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
