"""Data sets of the Hub, by the real library over HTTP, from a server on this machine that answers as the Hub does."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpformer.data import Reading
from dpformer.data.histories import read
from tests.data.sources.servers import free_port
from tests.tiny_runs import printed, refused
from tests.training.logs import write_log

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
NAME, OLD, NEW = "shop/events", "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders OLD and NEW of this path are the commits of the data set `shop/events`; NEW is the current one."""
    root = tmp_path / "hub"

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def do_GET(self, body: bool = True) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:4] == ["api", "datasets", *NAME.split("/")]:
                commit = parts[5] if len(parts) > 5 else NEW
                folder = root / commit
                files = [{"rfilename": str(p.relative_to(folder))} for p in sorted(folder.rglob("*")) if p.is_file()]
                answer = json.dumps({"id": NAME, "sha": commit, "siblings": files}).encode()
                self._answer(200 if folder.is_dir() else 404, answer, "RevisionNotFound", body)
            elif parts[:3] == ["datasets", *NAME.split("/")] and parts[3] == "resolve":
                file = root / parts[4] / "/".join(parts[5:])
                content = file.read_bytes() if file.is_file() else b""
                self._answer(200 if file.is_file() else 404, content, "EntryNotFound", body, commit=parts[4])
            else:
                self._answer(401, b"{}", "RepoNotFound", body)

        def _answer(self, code: int, content: bytes, wrong: str, body: bool, commit: str = NEW) -> None:
            self.send_response(code)
            if code != 200:
                self.send_header("X-Error-Code", wrong)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    yield root
    server.shutdown()


def at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """The library reads HF_ENDPOINT when it is imported, which another test may have done."""
    import huggingface_hub.hf_api

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)


def test_a_file_a_folder_a_glob_and_a_commit(hub: Path, tmp_path: Path) -> None:
    old, new = write_log(tmp_path / "old.csv"), write_log(tmp_path / "new.csv", seed=1)
    for commit, log in ((OLD, old), (NEW, new)):
        (hub / commit / "data").mkdir(parents=True)
        (hub / commit / "data" / "log.csv").write_bytes(log.read_bytes())
        (hub / commit / "README.md").write_text("# Events\n")
        (hub / commit / ".gitattributes").write_text("")
    for path in ("/data/log.csv", "/data", "/**/*.csv", "", f"@{NEW}/data/log.csv"):
        found = read(f"hf://datasets/{NAME}{path}")
        assert found.named() == read(new).named() and found.facts["snapshot"] == NEW
    for found in (
        read(f"hf://datasets/{NAME}@{OLD}/data"),
        read(f"hf://datasets/{NAME}/data", reading=Reading(snapshot=OLD)),
    ):
        assert found.named() == read(old).named() and found.facts["snapshot"] == OLD
    run = tmp_path / "run"
    printed("train", f"hf://datasets/{NAME}/data/log.csv", "--out", run, "--epsilon", 8, "--model", "counts")
    assert "data and split are the same" in printed("verify", run)


def test_what_cannot_be_read_is_one_sentence(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub / NEW / "_delta_log").mkdir(parents=True)
    (hub / NEW / "_delta_log" / "00000000000000000000.json").write_text("{}")
    write_log(hub / NEW / "log.csv")
    for url, sentence in {
        f"hf://datasets/{NAME}/nothing.csv": "nothing found at ",
        f"hf://datasets/{NAME}@{'3' * 40}/log.csv": "in that revision",
        f"hf://datasets/{NAME}": "part of a table of Delta Lake",
        "hf://datasets/shop/other": "there is no data set at ",
        "hf://shop/events": "names no data set",
    }.items():
        assert sentence in refused("data", url), url
    at(monkeypatch, f"http://127.0.0.1:{free_port()}")
    assert "cannot be reached" in refused("data", f"hf://datasets/{NAME}/log.csv")
