"""Who may ask: hosts, origins, tokens; headers that never end; the access log."""

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from dpformer.errors import DpformerError
from dpformer.serving.access import Access
from dpformer.serving.limits import Limits
from dpformer.serving.served import Served
from tests.serving.server import Server, serving
from tests.tiny_runs import tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401

TOKEN = "a-token-of-this-test"
SHOP = "https://shop.example"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    none = dict.fromkeys(("batch_size", "epochs", "dim", "blocks"))
    return Served.open(tiny_run(tmp_path_factory, model="counts", **none))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "access.jsonl"


@pytest.fixture(scope="module")
def server(served: Served, log: Path) -> Iterator[Server]:
    tokens = log.with_name("tokens")
    tokens.write_text(f"another-token-of-it\n{TOKEN}\n")
    access = Access.of(["api.shop.example", "*.internal.example"], [SHOP], tokens)
    with serving(served, replace(Limits(), head_seconds=0.3), access, log) as found:
        yield found


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("127.0.0.1:8000", True),
        ("10.2.3.4", True),  # a probe asks by address, and no name can be pointed at this machine that way
        ("[::1]:8000", True),
        ("api.shop.example", True),
        ("a.b.internal.example:80", True),
        ("internal.example", False),
        ("evil.com", False),
        ("localhost.evil.com", False),
        ("127.0.0.1.evil.com", False),
        ("api.shop.example.evil.com", False),
        ("", False),
    ],
)
def test_hosts(host: str, known: bool) -> None:
    assert Access.of(["api.shop.example", "*.internal.example"]).knows_host(host.encode()) is known


def test_a_request_to_another_host_is_refused(server: Server) -> None:
    answer = server.ask("GET", "/healthz", headers={"host": "evil.com"})
    assert answer.status == 400 and "evil" not in answer.body.decode()


def test_a_token_is_needed_for_what_the_model_knows(server: Server) -> None:
    wrong = ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": f"Basic {TOKEN}"})
    for headers in wrong:
        answer = server.ask("POST", "/recommend", {"history": []}, headers=headers)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
    for path in (
        "/items",
        "/statement",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/similar/i1",
        "/health",
        "//",
        "/READY",
    ):
        assert server.ask("GET", path).status == 401, path
    right = {"authorization": f"Bearer {TOKEN}"}
    assert server.ask("POST", "/recommend", {"history": []}, headers=right).status == 200
    assert server.ask("GET", "/metrics", headers={"authorization": "bearer another-token-of-it"}).status == 200
    for path in ("/healthz", "/ready", "/", "/static/page.js"):
        assert server.ask("GET", path).status == 200, path


def test_scripts_of_one_page_may_ask(server: Server) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    allowed = server.ask("OPTIONS", "/recommend", headers={"origin": SHOP, **ask})
    assert allowed.status == 200 and allowed.headers["access-control-allow-origin"] == SHOP
    refused = server.ask("OPTIONS", "/recommend", headers={"origin": "https://evil.com", **ask})
    assert refused.status == 400 and "access-control-allow-origin" not in refused.headers
    answer = server.ask("POST", "/recommend", {"history": []}, headers={"origin": SHOP})
    assert answer.status == 401 and answer.headers["access-control-allow-origin"] == SHOP


def test_headers_that_do_not_end_are_cut_off(server: Server) -> None:
    for started in (b"", b"GET /healthz HTTP/1.1\r\nhost: local"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(started)
            assert client.recv(1000).startswith(b"HTTP/1.1 408")
            assert client.recv(1000) == b""


def test_an_access_log_has_routes_and_nothing_of_what_was_asked(server: Server, log: Path) -> None:
    right = {"authorization": f"Bearer {TOKEN}", "x-request-id": "from-the-proxy.7"}
    server.ask("GET", "/similar/i7?k=3", headers=right)
    server.ask("POST", "/recommend", {"history": ["secret-item"]}, headers={**right, "x-request-id": "i7 {evil}"})
    server.ask("SECRET", "/secret-path?secret=1", headers=right)
    while '"other", "route"' not in log.read_text():  # a line follows its answer
        time.sleep(0.01)
    lines = [json.loads(line) for line in log.read_text().splitlines()[-3:]]
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("GET", "/similar/{item_id}", 200),
        ("POST", "/recommend", 200),
        ("other", "other", 404),
    ]
    assert [line.get("request_id") for line in lines] == ["from-the-proxy.7", None, "from-the-proxy.7"]
    assert all(line["ms"] > 0 and line["bytes"] > 0 for line in lines)
    text = log.read_text()
    assert not any(word in text for word in ("secret", "evil", TOKEN, "127.0.0.1", "i7 ", "/i7"))


def test_what_is_no_host_origin_or_token_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("123\n")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for given, words in (
        ({"hosts": ["https://shop.example"]}, "is not a name"),
        ({"origins": ["shop.example"]}, "is not an origin"),
        ({"origins": ["*"]}, "is not an origin"),
        ({"token_file": tmp_path / "none"}, "cannot be read"),
        ({"token_file": short}, "a token of 3 characters"),
        ({"token_file": empty}, "holds no token"),
    ):
        with pytest.raises(DpformerError, match=words):
            Access.of(**given)  # type: ignore[arg-type]
