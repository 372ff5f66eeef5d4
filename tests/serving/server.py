"""A service in a thread of the test, on a free port, asked over HTTP."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpformer.serving.access import Access
from dpformer.serving.limits import Limits
from dpformer.serving.served import Served


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Server:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, content, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        answer = self.ask("GET", path)
        assert answer.status == 200, answer
        return answer.json

    def post(self, path: str, **body: Any) -> Any:
        answer = self.ask("POST", path, body)
        assert answer.status == 200, answer
        return answer.json


@contextmanager
def serving(
    served: Served, limits: Limits | None = None, access: Access | None = None, log: Path | None = None
) -> Iterator[Server]:
    from dpformer.serving import http as serving_http
    from dpformer.serving.access_log import AccessLog
    from dpformer.serving.app import create_app

    with serving_http.listening("127.0.0.1", 0) as socket:
        app = create_app(served, limits, access, None if log is None else AccessLog(log))
        server = serving_http.Server(app, replace(limits or Limits(), drain_seconds=0))
        thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield Server(socket.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(10)
