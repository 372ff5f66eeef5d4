"""Real servers for tests of data sources: started once, on this machine, and stopped at the end."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def until(ready: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Waits until a server answers; one that ends before fails the test with what it wrote."""
    for _ in range(600):
        if process.poll() is not None:
            pytest.fail(f"the server ended: {log.read_text(errors='replace')[-2000:]}")
        if ready():
            return
        time.sleep(0.1)
    pytest.fail(f"the server does not answer: {log.read_text(errors='replace')[-2000:]}")


def answers(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that speaks S3 (moto's), with an empty bucket `shop`."""
    pytest.importorskip("moto.server", reason="moto's server is not installed: pip install 'moto[s3]' flask flask-cors")
    log, port = tmp_path_factory.mktemp("s3") / "log", free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=out, env={**os.environ})
    try:
        until(lambda: answers(port), process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
