"""The Dockerfile and compose.yaml: what they run is run here by the same entry point, without Docker."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpformer.cli import app
from dpformer.runs.config import Config
from tests.tiny_runs import invoke

ROOT = Path(__file__).parents[2]


def instructions() -> dict[str, str]:
    """The last value of each instruction of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#"))


def services() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


def options(arguments: list[str]) -> dict[str, Any]:
    """What the command line makes of arguments, without running them; unknown ones are an error."""
    import typer

    group: Any = typer.main.get_command(app)
    command = group.commands[arguments[0]]
    with command.make_context(arguments[0], list(arguments[1:])) as context:
        return dict(context.params)


def test_the_entry_point_is_the_installed_command() -> None:
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert json.loads(instructions()["ENTRYPOINT"]) == list(scripts)


def test_what_the_containers_run_is_understood() -> None:
    given = options(json.loads(instructions()["CMD"]))
    assert given["host"] == "0.0.0.0" and given["watch"] and given["access_log"] == "-"
    assert str(given["port"]) == instructions()["EXPOSE"] and f":{given['port']}/ready" in instructions()["HEALTHCHECK"]
    serve = options(services()["serve"]["command"])
    assert serve["workers"] == 2 and f":{serve['port']}:" in services()["serve"]["ports"][0]
    train = options(services()["train"]["command"])
    assert serve["run"] == train["out"]
    for name, service in services().items():
        mounted = [volume.split(":")[1] for volume in service["volumes"]]
        paths = [word for word in service["command"] if word.startswith("/")]
        assert paths and all(any(path.startswith(folder) for folder in mounted) for path in paths), name
    assert Config.make(file=train["file"], catalog=train["catalog"], epsilon=train["epsilon"]).private


def test_training_by_compose_makes_what_serving_by_compose_opens(tmp_path: Path) -> None:
    """The very arguments, with the mounted folders where they are here."""
    from dpformer.serving.served import Served
    from tests.tiny_runs import write_catalog
    from tests.training.logs import write_log

    (tmp_path / "data").mkdir()
    write_log(tmp_path / "data" / "shop.csv")
    write_catalog(tmp_path / "data" / "items.csv")
    words = [re.sub(r"^/(?=data|runs)", f"{tmp_path}/", word) for word in services()["train"]["command"]]
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    (run,) = (word for word in services()["serve"]["command"] if word.startswith("/runs"))
    assert Served.open(f"{tmp_path}{run}").statement["private"] is True


def test_the_image_is_built_of_files_that_are_there() -> None:
    text = (ROOT / "Dockerfile").read_text()
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _ = shlex.split(line)
        assert all((ROOT / source).exists() and source.removeprefix("./") in kept for source in sources), line
    extras = re.findall(r'"\.\[(.*?)\]"', text)[0].split(",")
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = ", declared, re.MULTILINE) for extra in extras)


def test_the_health_check_tells_a_service_that_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as it stands against a server of its port, and fails where there is none."""
    import subprocess
    import sys
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    (check,) = re.findall(r"CMD (\[.*\])", instructions()["HEALTHCHECK"])
    program, *arguments = json.loads(check)
    assert program == "python"
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = [word.replace(":8000/", f":{server.server_port}/") for word in arguments]
        assert subprocess.run([sys.executable, *here], check=False).returncode == 0
        wrong = [word.replace("/ready", "/nothing") for word in here]
        assert subprocess.run([sys.executable, *wrong], check=False, capture_output=True).returncode != 0
        server.shutdown()
