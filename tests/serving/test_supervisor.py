"""`dpformer serve` as a process: workers that share a model, reloads that lose no request, an orderly end."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from tests.commands import Command
from tests.serving.server import Server
from tests.tiny_runs import tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401

COUNTS = {"model": "counts", **dict.fromkeys(("batch_size", "epochs", "dim", "blocks"))}


class Service:
    """The command, what it has said so far, and a client of it."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.until(lambda: self.said("http://"), "the address")
        self.client = Server(int(re.findall(r"http://[^:]*:(\d+)", command.written()[0])[0]))

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 240
        while not holds():
            assert self.command.process.is_alive(), (what, self.command.written())
            assert time.monotonic() < end, (what, self.command.written())
            time.sleep(0.05)

    def said(self, words: str) -> bool:
        return any(words in text for text in self.command.written())

    def children(self, pid: int) -> list[int]:
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
        return [int(word) for word in found.stdout.split()]


@contextmanager
def service(*arguments: object) -> Iterator[Service]:
    command = Command("serve", *arguments, "--port", 0)
    try:
        yield Service(command)
    finally:
        command.process.terminate()
        command.ended(60)


class Clients:
    """Asks all the time, each time on a new connection or on one that is kept, and notes what comes back."""

    def __init__(self, server: Server) -> None:
        self.server, self.models, self.failures = server, set[str](), list[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(kept,)) for kept in (False, True)]

    def _ask(self, kept: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        while not self._stop.is_set():
            try:
                connection.request("GET", "/ready")
                answer = connection.getresponse()
                facts = json.loads(answer.read())
                if answer.status not in (200, 503):
                    self.failures.append(str(answer.status))
                self.models.add(facts["model"])
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
            if not kept:
                connection.close()
            time.sleep(0.005)
        connection.close()

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)


def test_the_next_model_takes_over_and_no_request_is_lost(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """A link that is turned, a broken model, a worker that dies, SIGHUP, SIGTERM: one service lives through all."""
    first, second = (tiny_run(tmp_path_factory, **{**COUNTS, "epsilon": epsilon}) for epsilon in (8.0, 4.0))
    current = tmp_path / "current"
    current.symlink_to(first)
    with service(current, "--workers", 2, "--watch", "--access-log", tmp_path / "access.jsonl") as running:
        with Clients(running.client) as clients:
            running.until(lambda: len(clients.models) == 1, "an answer")
            (tmp_path / "new").symlink_to(second)
            (tmp_path / "new").replace(current)
            running.until(lambda: running.said("serving TransitionCounts"), "the second model")
            (generation,) = _settled(running)
            workers = running.children(generation)
            os.kill(workers[0], signal.SIGKILL)
            running.until(lambda: running.said("worker") and len(running.children(generation)) == 2, "a new worker")
        statement = json.loads((second / "privacy.json").read_text())
        assert running.client.get("/statement") == statement
        assert len(clients.models) == 2
        assert len(clients.failures) <= 2, clients.failures  # what the killed worker had in hand of each client
        counted = running.client.ask("GET", "/metrics").body.decode()
        total = sum(map(float, re.findall(r'dpformer_requests_total\{route="/ready".*\} (.*)', counted)))
        lines = (tmp_path / "access.jsonl").read_text().splitlines()
        ready = [line for line in map(json.loads, lines) if line["route"] == "/ready"]
        assert total == len(ready) and len({line["worker"] for line in ready}) >= 3  # all workers count together
        shutil.copytree(second, tmp_path / "broken")
        (tmp_path / "broken" / "model.safetensors").write_bytes(b"no model")
        current.unlink()
        current.symlink_to(tmp_path / "broken")
        os.kill(running.command.pid, signal.SIGHUP)
        running.until(lambda: running.said("the previous model stays"), "a refusal")
        assert running.client.get("/statement") == statement
        processes = [running.command.pid, *_settled(running), *running.children(generation)]
        running.command.process.terminate()
        assert running.command.ended(60).returncode == 0
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, 0)
                raise AssertionError(f"process {pid} is left")


def _settled(running: Service) -> list[int]:
    """The generations, once the old one has left."""
    running.until(lambda: len(running.children(running.command.pid)) == 1, "the old generation to leave")
    return running.children(running.command.pid)
