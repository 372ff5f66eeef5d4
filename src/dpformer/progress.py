"""Progress and remaining time: a bar on a terminal, occasional plain lines elsewhere.

Code that works reports it with `stage("ranking", users)` and `advance(n)`; it is shown only inside `shown()`, which the
command line opens, and only for work that takes longer than a moment. Everything goes to stderr.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

MOMENT = 3.0  # seconds before anything is shown
BETWEEN = 10.0  # seconds between plain lines


def say(line: str) -> None:
    """Print a message to the user on a separate line on stderr."""
    from rich.console import Console

    _print(Console(stderr=True), line)


def _print(console: Any, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass
class _Stage:
    what: str
    total: float
    console: Any
    done: float = 0.0
    began: float = field(default_factory=lambda: time.monotonic())
    said: float = 0.0
    bar: Any = None
    lock: Any = field(default_factory=threading.Lock)

    def reach(self, done: float) -> None:
        with self.lock:
            self.done = max(self.done, min(done, self.total))
            passed = time.monotonic() - self.began
            if passed < MOMENT or self.total <= 0:
                return
            if self.console.is_terminal:
                self._draw()
            elif passed - self.said >= BETWEEN:
                self.said = passed
                share = self.done / self.total
                left = f", about {math.ceil(passed * (1 - share) / share):,} s left" if share > 0 else ""
                _print(self.console, f"{self.what}: {share:.0%}{left}")

    def _draw(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        if self.bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.bar.add_task(self.what, total=self.total)
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=self.done)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()


_console: ContextVar[Any] = ContextVar("console", default=None)
_stage: ContextVar[_Stage | None] = ContextVar("stage", default=None)


@contextmanager
def shown() -> Iterator[None]:
    """Show the stages inside this context."""
    from rich.console import Console

    token = _console.set(Console(stderr=True))
    try:
        yield
    finally:
        _console.reset(token)


@contextmanager
def stage(what: str, total: float) -> Iterator[None]:
    """A piece of work of some size; a nested one counts as part of the outer one and is not shown."""
    if _console.get() is None or _stage.get() is not None:
        yield
        return
    made = _Stage(what, total, _console.get())
    token = _stage.set(made)
    try:
        yield
    finally:
        _stage.reset(token)
        made.end()


def advance(amount: float) -> None:
    """Report additional progress."""
    if (found := _stage.get()) is not None:
        found.reach(found.done + amount)


def reach(done: float) -> None:
    """Set absolute progress."""
    if (found := _stage.get()) is not None:
        found.reach(done)


@contextmanager
def watching(what: str, share: Any) -> Iterator[None]:
    """A stage whose worker does not report progress: a thread polls `share()` for the finished share."""
    if _console.get() is None or _stage.get() is not None:
        yield
        return
    made, over = _Stage(what, 1.0, _console.get()), threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            made.reach(share())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        made.end()


class Phases:
    """Time and memory of the phases of a command: wall-clock and processor seconds, peak memory at the end of each."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, float, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        wall, work = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            spent = time.monotonic() - wall, time.process_time() - work
            self.found.append((name, *spent, peak_memory() / 2**30))

    def __str__(self) -> str:
        return "time and memory: " + ", ".join(
            f"{name} {wall:.1f} s ({work:.1f} s CPU, {peak:.1f} GiB)" for name, wall, work, peak in self.found
        )


def peak_memory() -> int:
    """The peak memory of this process in bytes; 0 if the system does not say (Windows)."""
    try:
        resource = import_module("resource")
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
