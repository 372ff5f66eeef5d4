"""One generation of the service: opens a model once and forks workers that share its memory."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any

import torch
from prometheus_client import multiprocess

from dpformer.errors import DpformerError
from dpformer.serving.access_log import AccessLog
from dpformer.serving.app import create_app
from dpformer.serving.http import Server
from dpformer.serving.served import Served
from dpformer.serving.service import AGAIN_SECONDS, CRASHED, Service

REFUSED = 2


def live(service: Service, listener: Any, told: int, lifeline: int) -> int:
    """Serve from opening the model to the end of the last worker; returns the exit code.

    Args:
        service: what to serve.
        listener: the listening socket.
        told: descriptor for the report, one line of JSON: what is served, or why not.
        lifeline: descriptor that reaches its end when the supervisor is gone.
    """
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    try:
        served = Served.open(service.run, service.catalog)
        served.warm_up()
        if service.access_log is not None:
            AccessLog(service.access_log).close()
    except DpformerError as error:
        _report(told, {"error": str(error)})
        return REFUSED
    gc.collect()
    gc.freeze()  # the garbage collector would write into the pages that workers share
    facts = {"headline": served.statement["headline"], "model": _short(served)}
    return _Workers(service, served, listener, lifeline).keep(told, facts)


def _report(told: int, facts: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(told, json.dumps(facts).encode() + b"\n")


def _short(served: Served) -> str:
    return f"{type(served.release.model).__name__} {(served.model_sha256 or '')[:12]}"


class _Workers:
    """The workers of a generation."""

    def __init__(self, service: Service, served: Served, listener: Any, lifeline: int) -> None:
        self.service, self.served, self.listener, self.lifeline = service, served, listener, lifeline
        self.started, self.starts = os.pipe()
        self.pids: dict[int, float] = {}
        self._stopping = False

    def keep(self, told: int, facts: dict[str, Any]) -> int:
        """Start them, report once all accept connections, and replace those that die until told to stop."""
        heard, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for _ in range(self.service.workers):
            self._fork(told, heard, woken)
        due = self.service.workers
        while not self._stopping:
            found, _, _ = select.select([heard, self.lifeline, self.started], [], [], 1.0)
            if self.lifeline in found:
                break
            if heard in found:
                os.read(heard, 4096)
            if self.started in found:
                due -= len(os.read(self.started, 4096))
                if due <= 0 and told >= 0:
                    _report(told, facts)
                    os.close(told)
                    told = -1
            if self._replace(told, heard, woken) and told >= 0:
                return CRASHED  # a worker died before all were up
        self._end()
        return 0

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _fork(self, *descriptors: int) -> None:
        pid = os.fork()
        if pid:
            self.pids[pid] = time.monotonic()
            return
        code = CRASHED
        try:
            for descriptor in (*descriptors, self.started):
                if descriptor >= 0:
                    os.close(descriptor)
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(name, signal.SIG_DFL)
            self._work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _work(self) -> None:
        """The main function of a worker."""
        service = self.service
        torch.set_num_threads(service.threads)
        parent = os.getppid()

        def retiring() -> bool:
            return server.should_exit

        log = None if service.access_log is None else AccessLog(service.access_log)
        app = create_app(self.served, service.limits, service.access, log, retiring=retiring)
        server = _Worker(app, service.limits, lambda: os.write(self.starts, b"."))
        server.parent = parent
        server.run([self.listener])

    def _replace(self, *descriptors: int) -> bool:
        """Fork again for workers that have died; returns whether there were any."""
        dead = self._reap()
        for pid, began in dead:
            print(f"dpformer: worker {pid} died; starting another", file=sys.stderr, flush=True)
            if time.monotonic() - began < AGAIN_SECONDS:
                time.sleep(AGAIN_SECONDS)
            self._fork(*descriptors)
        return bool(dead)

    def _reap(self) -> list[tuple[int, float]]:
        dead = []
        for pid, began in list(self.pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[pid]
                multiprocess.mark_process_dead(pid)
                dead.append((pid, began))
        return dead

    def _end(self) -> None:
        limits = self.service.limits
        end = time.monotonic() + limits.drain_seconds + limits.stop_seconds + 2
        for pid in self.pids:
            os.kill(pid, signal.SIGTERM)
        while self.pids and time.monotonic() < end:
            self._reap()
            time.sleep(0.01)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)


class _Worker(Server):
    """Ends when its parent does, for whatever reason."""

    parent = 0

    async def on_tick(self, counter: int) -> bool:
        if os.getppid() != self.parent:
            self.should_exit = True
        return await super().on_tick(counter)
