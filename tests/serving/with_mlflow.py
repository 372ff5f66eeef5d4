"""MLflow, with a real tracking server on this machine: run by test_mlflow.py, where mlflow is installed."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dpformer as dp
from tests.tiny_runs import tiny_run

mlflow = pytest.importorskip("mlflow")
pd = pytest.importorskip("pandas")

from dpformer.serving.mlflow import log_run  # noqa: E402  (only where mlflow is)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{folder}/m.db", "--artifacts-destination", str(folder / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with subprocess.Popen([*command, *store], cwd=folder, env={**os.environ, "DO_NOT_TRACK": "true"}) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=1)
                    break
                except OSError:
                    time.sleep(0.5)
            yield address
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def logged(server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run = tiny_run(tmp_path_factory, model="counts", private_metrics=True, seed=None)
    mlflow.set_tracking_uri(server)
    return run, log_run(run, experiment="shop", registered_model="shop")


def test_the_server_has_the_guarantee_and_nothing_exact(logged: tuple[Path, str]) -> None:
    run, identity = logged
    facts = json.loads((run / "privacy.json").read_text())
    found = mlflow.get_run(identity).data
    assert found.tags["dp.epsilon"] == str(facts["epsilon"]) and found.tags["dp.delta"] == str(facts["delta"])
    assert found.tags["dp.headline"] == facts["headline"]
    assert found.metrics == {f"{name}_at_10": facts["metrics"][f"{name}@10"] for name in ("ndcg", "hit")}
    assert found.params == {"model": "counts", "users": str(facts["users"])}
    copied = mlflow.artifacts.download_artifacts(run_id=identity, artifact_path="privacy.json")
    assert json.loads(Path(copied).read_text()) == facts


def test_the_registered_model_recommends_as_the_run_does(logged: tuple[Path, str]) -> None:
    run, _ = logged
    model = mlflow.pyfunc.load_model("models:/shop/1")
    history = ["i3", "i7"]
    found = model.predict(pd.DataFrame({"history": [history, ["i1"]]}))
    rec = dp.load(run)
    for items, one in zip(found, (history, ["i1"]), strict=True):
        expected = rec.recommend({"a": one}, k=10)
        assert list(items) == list(np.asarray(expected["item_id"]))
    shown = model.predict(pd.DataFrame({"history": [history]}), params={"k": 3, "filter_seen": False})
    assert list(shown[0]) == list(rec.recommend({"a": history}, k=3, filter_seen=False)["item_id"])
    names = [path.name for path in Path(mlflow.artifacts.download_artifacts("models:/shop/1")).rglob("*")]
    assert "privacy.json" in names and "metrics.jsonl" not in names
