"""Several processes make the model that one makes, add noise once, and stop and resume cleanly."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpformer import runs as training
from dpformer.training.optimizer import PrivateOptimizer
from tests.distributed import jobs
from tests.distributed.conftest import Alone, config_of
from tests.training.memo import _known


def model_of(out: Path) -> dict[str, torch.Tensor]:
    return {name: t.double() for name, t in load_file(out / "model.safetensors").items() if t.is_floating_point()}


def assert_same(ours: Path, theirs: Path, atol: float = 1e-6) -> None:
    a, b = model_of(ours), model_of(theirs)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol)


def metrics(out: Path, *names: str) -> list[list[Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in names] for line in lines]


# One user a batch on average: a third of the batches are empty, and most shares.
SMALL = {"batch_size": 1, "epochs": 1}
LARGE = {"batch_size": 30}
LONG = {"batch_size": 20, "epochs": 8}
BANDED = {"batch_size": 15, "bands": 3}
HALF = {"batch_size": 30, "bf16": True}
TEXT = {"task": "lm", "unit": "chunk", "batch_size": 60, "epochs": 1}


@pytest.mark.parametrize(("size", "changes"), [(2, LARGE), (3, SMALL), (3, TEXT), (2, BANDED), (2, HALF)])
def test_the_model_of_one_process(log: Path, alone: Alone, tmp_path: Path, size: int, changes: dict[str, Any]) -> None:
    """Sampling, dropout, clipping, noise, Adam: anything done twice, left out or drawn anew would show.

    And the others never hold more of the data than their share of a step.
    """
    config, together = config_of(log, **changes), tmp_path / "together"
    expected = alone(config)
    assert jobs.finish(jobs.start(size, jobs.train_and_look, config, together, _known)) == [0] * size
    assert_same(together, expected)
    assert metrics(together, "step", "users", "skipped_users") == metrics(expected, "step", "users", "skipped_users")
    assert json.loads((together / "privacy.json").read_text()) == json.loads((expected / "privacy.json").read_text())
    assert changes is not SMALL or [0] in metrics(expected, "users")


def test_processes_that_see_the_store_read_their_own_histories(log: Path, alone: Alone, tmp_path: Path) -> None:
    config, together = config_of(log, **LARGE), tmp_path / "together"
    stored = config.replace(cache=tmp_path / "prepared")
    assert jobs.finish(jobs.start(3, jobs.train_and_read, stored, together, _known)) == [0] * 3
    assert_same(together, alone(config))


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_and_resumed(log: Path, alone: Alone, tmp_path: Path, killed: int) -> None:
    """kill -9 of the leader or of another: all end by themselves, and the resumed job makes the same model."""
    config, together = config_of(log, **LONG), tmp_path / "together"
    expected = alone(config)
    processes = jobs.start(3, jobs.train_and_stay, config, together, _known)
    jobs.wait_for_steps(together, 5)
    os.kill(processes[killed].pid or 0, signal.SIGKILL)
    jobs.leave_file(together).touch()
    codes = jobs.finish(processes)
    assert codes == [-signal.SIGKILL if rank == killed else 2 for rank in range(3)]
    assert not (together / "privacy.json").exists()
    assert jobs.finish(jobs.start(2, jobs.train, config, together, _known)) == [0, 0]
    assert_same(together, expected)
    assert metrics(together, "step", "users") == metrics(expected, "step", "users")


def test_stopped_politely(log: Path, alone: Alone, tmp_path: Path) -> None:
    """SIGTERM to all, as torchrun sends it: the leader finishes its step, saves and sends the others home."""
    config = config_of(log, **LONG)
    processes = jobs.start(2, jobs.train_and_stay, config, tmp_path / "run", _known)
    jobs.wait_for_steps(tmp_path / "run", 3)
    for process in reversed(processes):
        process.terminate()
    jobs.leave_file(tmp_path / "run").touch()
    assert jobs.finish(processes) == [130, 0]
    step = len(metrics(tmp_path / "run", "step"))
    training.resume(tmp_path / "run")  # alone
    expected = alone(config)
    assert 3 <= step < len(metrics(expected, "step"))
    assert_same(tmp_path / "run", expected)


def test_memory_that_runs_out_in_one_process(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It halves what it cannot hold, nobody counts twice, and later steps deal out smaller micro-batches.

    With noise of the step alone: other micro-batches round otherwise, and another sum has other noise.
    """
    monkeypatch.setattr(PrivateOptimizer, "_address", lambda self, *_: self._random)
    config = config_of(log, dropout=0.0, batch_size=60, epochs=1, micro_batch_tokens=40)
    expected = training.train(config, tmp_path / "alone").folder
    assert jobs.finish(jobs.start(2, jobs.train_with_little_memory, config, tmp_path / "together", _known)) == [0, 0]
    assert_same(tmp_path / "together", expected, atol=1e-4)
    tokens = [t for (t,) in metrics(tmp_path / "together", "micro_batch_tokens")]
    assert max(tokens) < 40


def test_an_error_of_the_leader_ends_all(log: Path, tmp_path: Path) -> None:
    config = config_of(log)
    (tmp_path / "run").write_text("not a folder")
    codes = jobs.finish(jobs.start(2, jobs.train, config, tmp_path / "run", _known))
    assert codes == [2, 0]


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    key = bytes(range(32))
    for size in (1, 2, 3):
        assert jobs.finish(jobs.start(size, jobs.own_loop, tmp_path / f"{size}.pt", key)) == [0] * size
    weights = [torch.load(tmp_path / f"{size}.pt", weights_only=True)["weight"] for size in (1, 2, 3)]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(weights[2], weights[0], rtol=0, atol=1e-6)


def test_wrapped_models_are_refused() -> None:
    assert jobs.finish(jobs.start(2, jobs.wrapped_models)) == [0, 0]
