"""A service that stays up: it starts workers that share one model, and replaces them when the model changes.

    supervisor            holds the listening socket; imports neither torch nor the model
      generation          opens the model once, then forks
        worker, worker …  share its memory; each answers connections of the shared socket

On SIGHUP, or when the watched folder changes, a new generation opens the model. Once its workers accept connections,
the old ones stop accepting, answer their remaining requests, and exit: no request is refused. If the new model cannot
be opened, the old one stays. Workers that die are replaced.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dpformer.errors import DpformerError
from dpformer.serving.service import AGAIN_SECONDS, CRASHED, Service

SHARED = "PROMETHEUS_MULTIPROC_DIR"
WATCH_SECONDS = 1.0


class Generation:
    """A process that holds a model and its workers, as seen by its supervisor."""

    report: int
    lifeline: int

    def __init__(self, service: Service, listener: Any, inherited: list[Generation]) -> None:
        report, told = os.pipe()
        ends, self.lifeline = os.pipe()  # the child reads end-of-file when this process is gone
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in (report, self.lifeline, *(d for g in inherited for d in (g.report, g.lifeline))):
                with suppress(OSError):
                    os.close(descriptor)
            _child(service, listener, told, ends)
        os.close(told)
        os.close(ends)
        self.report, self.began, self._said = report, time.monotonic(), b""
        self.facts: dict[str, Any] | None = None

    def hear(self) -> dict[str, Any] | None:
        """Its report, when it is ready or has failed; None if it died without one."""
        while part := os.read(self.report, 65_536):
            self._said += part
            if self._said.endswith(b"\n"):
                self.facts = json.loads(self._said)
                return self.facts
        return None

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def forget(self) -> None:
        os.close(self.report)
        os.close(self.lifeline)


def _child(service: Service, listener: Any, told: int, ends: int) -> None:
    """The main function of a generation; never returns."""
    code = CRASHED
    try:
        for name in (signal.SIGHUP, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        from dpformer.serving.generation import live

        code = live(service, listener, told, ends)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Supervisor:
    """See the module.

    Args:
        service: what to serve.
        listener: the listening socket.
        announce: called with the report of the first generation.
        say: called with a sentence for each later event.
    """

    def __init__(
        self,
        service: Service,
        listener: Any,
        announce: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        self.service, self.listener, self.announce, self.say = service, listener, announce, say
        self.current: Generation | None = None
        self.coming: Generation | None = None
        self.leaving: list[Generation] = []
        self._asked = self._stopping = self._was_up = False
        self._seen = self._changing = service.identity()
        self._not_before = 0.0

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C."""
        with self._signals() as woken, _shared_metrics():
            self._start()
            try:
                while not self._stopping:
                    self._wait(woken)
                    self._bury()
                    if self.service.watch:
                        self._watch()
                    if self._asked and self.coming is None:
                        self._asked = False
                        self.say(f"reloading {self.service.run}")
                        self._start()
                    if self.current is None and self.coming is None and time.monotonic() >= self._not_before:
                        self._start()
            finally:
                self._stop_all()

    def _start(self) -> None:
        self._seen = self._changing = self.service.identity()
        self.coming = Generation(self.service, self.listener, self._all())

    def _all(self) -> list[Generation]:
        return [g for g in (self.current, self.coming, *self.leaving) if g is not None]

    def _wait(self, woken: int) -> None:
        """Wait for a signal, for news from the next generation, or for a second."""
        listened = [woken, *([] if self.coming is None else [self.coming.report])]
        found, _, _ = select.select(listened, [], [], WATCH_SECONDS)
        if woken in found:
            os.read(woken, 4096)
        if self.coming is None or self.coming.report not in found:
            return
        coming, self.coming = self.coming, None
        facts = coming.hear()
        if facts is not None and "error" not in facts:
            self._take_over(coming, facts)
            return
        self.leaving.append(coming)
        if not self._was_up:
            raise DpformerError(facts["error"]) if facts is not None else RuntimeError("the model's process died")
        self._not_before = time.monotonic() + AGAIN_SECONDS
        reason = "the process of the new model died" if facts is None else facts["error"]
        self.say(f"{reason}; " + ("the previous model stays" if self.current else "trying again"))

    def _take_over(self, coming: Generation, facts: dict[str, Any]) -> None:
        before, self.current = self.current, coming
        if self._was_up:
            self.say(f"serving {facts['model']}: {facts['headline']}")
        else:
            self.announce(facts)
        self._was_up = True
        self._not_before = time.monotonic() + AGAIN_SECONDS
        if before is not None:
            before.stop()
            self.leaving.append(before)

    def _bury(self) -> None:
        """Collect generations that have ended."""
        for generation in self._all():
            if generation is self.coming:  # its report says why
                continue
            pid, status = os.waitpid(generation.pid, os.WNOHANG)
            if not pid:
                continue
            if generation is self.current:
                self.say(f"the process of the model died ({os.waitstatus_to_exitcode(status)}); restarting it")
                self.current = None
            else:
                self.leaving.remove(generation)
            generation.forget()

    def _watch(self) -> None:
        """Request a new generation when the folder has changed and then been unchanged for a while."""
        found = self.service.identity()
        if found != self._seen and found == self._changing and found[0] != (None,):
            self._asked = True
        self._changing = found

    def _stop_all(self) -> None:
        for generation in self._all():
            generation.stop()
        limits = self.service.limits
        end = time.monotonic() + limits.drain_seconds + limits.stop_seconds + 5
        for generation in self._all():
            while time.monotonic() < end:
                with suppress(ChildProcessError):
                    if os.waitpid(generation.pid, os.WNOHANG)[0] == 0:
                        time.sleep(0.02)
                        continue
                break
            else:
                with suppress(ProcessLookupError):
                    os.kill(generation.pid, signal.SIGKILL)

    @contextmanager
    def _signals(self) -> Iterator[int]:
        """Signals as flags, and a descriptor that wakes `select`."""
        heard, woken = os.pipe()
        os.set_blocking(woken, False)
        before: dict[int, Any] = {}

        def ask(*_: Any) -> None:
            self._asked = True

        def stop(*_: Any) -> None:
            self._stopping = True

        for name, handler in ((signal.SIGHUP, ask), (signal.SIGTERM, stop), (signal.SIGINT, stop)):
            before[name] = signal.signal(name, handler)
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        earlier = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        try:
            yield heard
        finally:
            signal.set_wakeup_fd(earlier)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(heard)
            os.close(woken)


@contextmanager
def _shared_metrics() -> Iterator[None]:
    """A folder in which all workers count, created before any of them imports the metrics library."""
    with tempfile.TemporaryDirectory(prefix="dpformer-metrics-") as folder:
        os.environ[SHARED] = folder
        try:
            yield
        finally:
            os.environ.pop(SHARED, None)
