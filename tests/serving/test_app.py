"""The service over HTTP: answers, limits, what is never logged."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from dpformer.errors import DpformerError
from dpformer.runs.model_file import sha256_of
from dpformer.serving.limits import Limits
from dpformer.serving.served import Served
from tests.serving.server import Server, serving
from tests.tiny_runs import copied, ranking_of, refused, same_ranking, tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory, model="counts", **dict.fromkeys(("batch_size", "epochs", "dim", "blocks")))


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with serving(Served.open(run)) as found:
        yield found


def test_recommendations(server: Server, run: Path) -> None:
    answer = server.post("/recommend", history=["i3", "i4", "never seen"], k=3, why=True)
    assert answer["history"] == 2 and answer["unknown"] == 1 and len(answer["recommendations"]) == 3
    own = Served.open(run).release
    (expected,) = own.recommend([own.index(["i3", "i4"])], 3)
    same_ranking(ranking_of(answer["recommendations"]), ranking_of(expected))
    first = answer["recommendations"][0]
    assert sum(part["contribution"] for part in first["why"]) + first["popularity"] == pytest.approx(1)
    assert {"i3", "i4"}.isdisjoint(r["item_id"] for r in answer["recommendations"])
    again = server.post("/recommend", history=["i3", "i4"], k=100, filter_seen=False)
    assert len(again["recommendations"]) == 20 and "method" not in again
    assert len(server.post("/recommend")["recommendations"]) == 10  # nobody's history: what is popular


def test_explain_similar_items(server: Server) -> None:
    why = server.post("/explain", history=["i3", "i4"], item_id="i5")
    assert [part["item_id"] for part in why["why"]] == ["i3", "i4"] and "share" in why["method"]
    assert all(0 < s["similarity"] <= 1.0001 for s in server.get("/similar/i3?k=5")["items"])
    assert server.get("/items?q=title+1&limit=3")["items"][0]["title"].startswith("Title 1")
    for answer in (server.ask("GET", "/similar/nothing"), server.ask("POST", "/explain", {"item_id": "nothing"})):
        assert (
            answer.status == 404 and "does not know" in answer.json["detail"] and "nothing" not in answer.body.decode()
        )


def test_statement_and_health(server: Server, run: Path) -> None:
    assert server.get("/statement") == json.loads((run / "privacy.json").read_text())
    health = server.get("/health")
    assert health["status"] == "ok" and health["private"] is True and health["items"] == 20


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"history": ["i1"] * 1001}, 422, "at most 1000"),
        ({"history": ["i" * 300]}, 422, "at most 256"),
        ({"k": 101}, 422, "less than or equal to 100"),
        ({"k": 0}, 422, "greater than or equal to 1"),
        ({"history": "i1"}, 422, "list"),
        ({"history": ["i1", "never seen"], "unknown": "error"}, 422, "does not know 1 of the 2 items"),
        ({"history": ["i1"], "extra": 1}, 422, "not permitted"),
        ({"history": [["i1"]]}, 422, "string"),
    ],
)
def test_limits(server: Server, body: dict[str, object], status: int, word: str) -> None:
    answer = server.ask("POST", "/recommend", body)
    assert answer.status == status and word in answer.body.decode()


def test_bodies_are_small_and_quick(server: Server, run: Path) -> None:
    assert server.ask("POST", "/recommend", raw=b"{" + b" " * 270_000 + b"}").status == 413
    assert server.ask("POST", "/recommend", raw=b"{").status == 422
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    parts = iter([b" " * 140_000, b" " * 140_000])  # no length announced
    connection.request("POST", "/recommend", parts, {"content-type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    with serving(Served.open(run), replace(Limits(), body_seconds=0.2)) as slow:
        import socket

        with socket.create_connection(("127.0.0.1", slow.port), timeout=30) as client:
            client.sendall(b"POST /recommend HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{")
            assert b"408" in client.recv(100)
    with serving(Served.open(run), replace(Limits(), at_once=0)) as full:
        assert full.ask("GET", "/health").status == 503


def test_every_answer_is_shielded(server: Server) -> None:
    for path in ("/", "/docs", "/openapi.json", "/health", "/static/page.js", "/static/page.css", "/nothing"):
        headers = server.ask("GET", path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert server.ask("GET", "/static/../app.py").status == 404
    assert server.ask("GET", "/static/page.html").status == 404


def test_pages_load_nothing_from_elsewhere(server: Server) -> None:
    for path in ("/", "/docs", "/static/page.css", "/static/page.js"):
        text = server.ask("GET", path).body.decode()
        assert not re.search(r"""(?:src|href)=["'](?:https?:)?//|url\(|@import|https?://""", text), path
    docs = server.ask("GET", "/docs").body.decode()
    for route in server.get("/openapi.json")["paths"]:
        assert route in docs


def test_examples_are_of_this_model(server: Server) -> None:
    """What the documentation shows works as it stands."""
    popular = [item["item_id"] for item in server.get("/items?limit=3")["items"]]
    schema = server.get("/openapi.json")
    for route in ("Recommend", "Explain"):
        (example,) = schema["components"]["schemas"][f"{route}Request"]["examples"]
        answer = server.post(f"/{route.lower()}", **example)
        assert example["history"] == popular[1:] and answer["unknown"] == 0
    docs = server.ask("GET", "/docs").body.decode()
    (address,) = re.findall(r"curl &#39;HOST(/similar/.*?)&#39;|curl 'HOST(/similar/.*?)'", docs)
    assert server.get("".join(address))["items"] is not None and popular[0] in "".join(address)


def test_probes(server: Server, run: Path) -> None:
    assert server.get("/healthz") == {"status": "ok"}
    assert server.get("/ready")["ready"] is True
    assert server.get("/ready")["model"] == sha256_of(run / "model.safetensors")


def test_items_are_found_by_id_and_by_title(server: Server) -> None:
    assert server.get("/items?q=i7")["items"][0] == {"item_id": "i7", "title": "Title 7"}
    assert server.get("/items?q=title+7")["items"][0] == {"item_id": "i7", "title": "Title 7"}


def test_metrics_count_routes_and_nothing_of_what_was_asked(server: Server) -> None:
    server.post("/recommend", history=["i3", "secret-item"])
    server.ask("GET", "/similar/i7")
    server.ask("GET", "/never-heard-of")
    text = server.ask("GET", "/metrics").body.decode()
    assert re.search(r'dpformer_requests_total\{route="/recommend",status="200"\} [1-9]', text)
    assert 'route="other",status="404"' in text and 'route="/similar/{item_id}",status="200"' in text
    assert "dpformer_model_epsilon 3." in text or "dpformer_model_epsilon 4." in text
    assert "secret-item" not in text and "i7" not in text and "never-heard-of" not in text


def test_histories_reach_no_log(
    run: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good requests, bad ones, and an error whose message quotes the input."""
    served = Served.open(run)

    def broken(names: list[str], *_: object, **__: object) -> None:
        raise ValueError(f"cannot bear {names}")

    caplog.set_level(logging.DEBUG)
    with serving(served) as server:
        server.post("/recommend", history=["i3", "secret-item"])
        bad = server.ask("POST", "/recommend", {"history": "secret-item"})
        assert bad.status == 422 and "secret-item" not in bad.body.decode()
        server.ask("POST", "/explain", {"history": ["secret-item"], "item_id": "i5"})
        monkeypatch.setattr(served, "recommend", broken)
        failed = server.ask("POST", "/recommend", {"history": ["secret-item"]})
    assert failed.status == 500 and "secret-item" not in failed.body.decode()
    said = capfd.readouterr()
    logged = "\n".join(record.getMessage() + str(record.exc_info or "") for record in caplog.records)
    assert "secret-item" not in said.out + said.err + logged
    assert "ValueError in" in logged


def test_a_seeded_run_is_served_as_not_private(tmp_path_factory: pytest.TempPathFactory) -> None:
    none = dict.fromkeys(("batch_size", "epochs", "dim", "blocks"))
    with serving(Served.open(tiny_run(tmp_path_factory, model="counts", seed=1, **none))) as server:
        assert server.get("/health")["private"] is False and server.get("/statement")["headline"].startswith("NOT")
        assert "dpformer_model_epsilon +Inf" in server.ask("GET", "/metrics").body.decode()


def test_a_file_alone_and_a_statement_of_another_model(run: Path, tmp_path: Path) -> None:
    alone = Served.open(run / "model.safetensors")
    assert alone.statement["headline"].startswith("User-level") and alone.statement["private"] is True
    other = copied(run, tmp_path)
    facts = json.loads((other / "privacy.json").read_text())
    (other / "privacy.json").write_text(json.dumps({**facts, "epsilon": 0.1}))
    with pytest.raises(DpformerError, match="does not belong to"):
        Served.open(other)
    assert "does not belong to" in refused("serve", other, "--port", 0)


def test_the_command_refuses_in_one_sentence(tmp_path: Path, run: Path, server: Server) -> None:
    assert "no model.safetensors" in refused("serve", tmp_path)
    assert f"cannot listen on 127.0.0.1 port {server.port}" in refused("serve", run, "--port", server.port)
