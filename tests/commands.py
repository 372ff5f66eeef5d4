"""`dpformer …` in a process of its own, forked from a server that has imported everything once.

A fresh interpreter spends five seconds of processor on importing torch and the accountant. What depends on how an
interpreter starts (its locale, `python -m`) needs one; exit codes, output and signals do not.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.distributed.jobs import CONTEXT


class Command:
    """A command under way, with its output in files."""

    def __init__(
        self,
        *arguments: Any,
        cwd: Path | None = None,
        stdout: str | None = "",
        before: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            arguments: after `dpformer`.
            cwd: where to run it.
            stdout: a file to write to instead; None is a closed one.
            before: is called in the process first.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="dpformer-command-")
        self._files = [str(Path(self._folder.name) / name) for name in ("stdout", "stderr")]
        out = self._files[0] if stdout == "" else stdout
        words = [str(argument) for argument in arguments]
        self.process: ForkServerProcess = CONTEXT.Process(
            target=_run, args=(words, out, self._files[1], dict(os.environ), str(cwd or Path.cwd()), before)
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def written(self) -> list[str]:
        """stdout and stderr so far."""
        return [Path(file).read_text() if Path(file).exists() else "" for file in self._files]

    def ended(self, seconds: float = 300) -> "subprocess.CompletedProcess[str]":
        """Waits for its end."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, ("it hangs", self.written())
        return subprocess.CompletedProcess([], self.process.exitcode, *self.written())

    def wait_for_lines(self, path: Path, lines: int) -> None:
        """Until a file has so many lines."""
        while not (path.exists() and path.read_text().count("\n") >= lines):
            assert self.process.is_alive(), self.written()
            time.sleep(0.02)


def command(*arguments: Any, **named: Any) -> "subprocess.CompletedProcess[str]":
    """Exit code and output of a command; see `Command`."""
    return Command(*arguments, **named).ended()


def _run(
    words: list[str],
    out: str | None,
    errors: str,
    environment: dict[str, str],
    cwd: str,
    before: Callable[[], None] | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in ((1, out), (2, errors)):
        if path is None:
            os.close(number)
        else:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    # As an interpreter makes them of its descriptors when it starts.
    sys.stdout = None if out is None else open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[assignment]  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = ["dpformer", *words]

    import torch

    from dpformer.cli import main

    torch.set_num_threads(1)
    if before is not None:
        before()
    main()
