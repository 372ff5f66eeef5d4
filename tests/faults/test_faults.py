"""Faults of machines and of data, as they really happen: processes, limits of the system, torn files, poisoned users.

Each time: nothing lost, nothing released too early, ε never under-counted, one clear sentence.
"""

import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Dataset
from dpformer.errors import DpformerError
from dpformer.kinds.network import build_model, make_trainer
from dpformer.noise import SecureRandom
from dpformer.runs import Config, load_dataset, load_release, resume, train
from dpformer.runs.checkpoint import load_checkpoint
from dpformer.runs.folder import RunFolder
from dpformer.runs.planning import make_plan
from dpformer.sampling import Batch
from dpformer.verification.verify import verify
from tests.training.conftest import tiny_config
from tests.training.crash import Crash, crash_after
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this file)

STEPS = 12


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A folder that other users of the machine may look into, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def config(home: Path) -> Config:
    return tiny_config(write_log(home / "log.csv"), checkpoint_seconds=0.0)


@pytest.fixture(scope="module")
def whole(config: Config, home: Path) -> bytes:
    """The model of an undisturbed run."""
    return (train(config, home / "whole").folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def stopped(config: Config, home: Path) -> Path:
    """A run that died in its sixth step."""
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, 5)
        with pytest.raises(Crash):
            train(config, home / "interrupted")
    return home / "interrupted"


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


def in_a_process(work: Callable[[], Any]) -> int:
    """Runs in a forked process: 0, or 2 after one clear sentence, or 3 after anything else."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 3
    try:
        work()
        code = 0
    except DpformerError as error:
        code = 2 if "\n" not in str(error) else 3
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def assert_finishes(folder: Path, expected: bytes) -> None:
    """Resumed, it is the undisturbed run bit for bit, every step counted once."""
    statement = resume(folder).statement
    assert model(folder) == expected
    assert statement["steps"] == STEPS and verify(folder).passed


# Processes.


def test_two_processes_on_one_folder(run: Path, whole: bytes) -> None:
    """The second one is told; the first one is not disturbed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        with RunFolder(run).lock():
            os.write(writer, b"locked")
            time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reader, 6) == b"locked"
        with pytest.raises(DpformerError, match=r"another process is using .*; wait for it, or stop it"):
            resume(run)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert_finishes(run, whole)  # the lock went with the process, however it ended


def test_two_processes_that_start_at_once(config: Config, tmp_path: Path, whole: bytes) -> None:
    """One makes the folder, the other is refused, whichever is first."""
    pids = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            code = 3
            try:
                train(config, tmp_path / "run")
                code = 0
            except DpformerError as error:
                code = 2 if "already exists" in str(error) else 3
            finally:
                os._exit(code)
        pids.append(pid)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    assert codes == [0, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["run"] and model(tmp_path / "run") == whole


@pytest.mark.parametrize("moment", ["write_json", "forget_secrets"])
def test_a_death_between_model_and_statement(
    config: Config, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The last moments, which random kills hardly meet: the model is written, the statement or the end is not."""
    work = getattr(RunFolder, moment)

    def dying(self: RunFolder, *given: Any) -> None:
        if moment == "forget_secrets" or given[0] == self.statement:
            raise KeyboardInterrupt
        work(self, *given)

    monkeypatch.setattr(RunFolder, moment, dying)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run")
    assert model(tmp_path / "run") == whole and (tmp_path / "run" / "checkpoint" / "state.safetensors").exists()
    monkeypatch.undo()
    assert_finishes(tmp_path / "run", whole)


# Disks.


@settings(max_examples=40)
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_torn_checkpoint(config: Config, stopped: Path, home: Path, where: float) -> None:
    content = (stopped / "checkpoint" / "state.safetensors").read_bytes()
    torn = home / "torn.safetensors"
    torn.write_bytes(content[: int(where * len(content))])
    with pytest.raises(DpformerError, match=r"is not an intact dpformer checkpoint .* start a new one") as error:
        load_checkpoint(torn, config=config.hash())
    assert "\n" not in str(error.value)


@settings(max_examples=40)
@given(where=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
def test_a_flipped_byte_in_a_checkpoint(stopped: Path, home: Path, where: float, bits: int) -> None:
    content = bytearray((stopped / "checkpoint" / "state.safetensors").read_bytes())
    content[int(where * len(content))] ^= bits
    flipped = home / "flipped.safetensors"
    flipped.write_bytes(bytes(content))
    with pytest.raises(DpformerError):
        load_checkpoint(flipped, config=Config.make(stopped / "config.toml").hash())


def test_a_torn_checkpoint_releases_nothing(run: Path) -> None:
    state = run / "checkpoint" / "state.safetensors"
    state.write_bytes(state.read_bytes()[: random.Random(0).randrange(state.stat().st_size)])
    with pytest.raises(DpformerError, match="this run cannot be resumed"):
        resume(run)
    assert not (run / "model.safetensors").exists() and not (run / "privacy.json").exists()


def test_a_checkpoint_that_is_a_pickle_runs_nothing(run: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"model": Bomb()}, run / "checkpoint" / "state.safetensors")
    with pytest.raises(DpformerError, match="is not an intact dpformer checkpoint"):
        resume(run)
    torch.save({"model": Bomb()}, tmp_path / "model.safetensors")
    with pytest.raises(DpformerError, match="is not an intact dpformer model"):
        load_release(tmp_path / "model.safetensors")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("limit", [100, 2_000, 20_000])
def test_a_full_disk(config: Config, tmp_path: Path, whole: bytes, limit: int) -> None:
    """The system refuses to write files beyond a size; later there is room again."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        train(config, tmp_path / "run")

    assert in_a_process(work) == 2
    assert not (tmp_path / "run" / "privacy.json").exists()
    if (tmp_path / "run").exists():
        # A run that had no checkpoint yet has drawn nothing that it could repeat; with the seed of this test, it can.
        assert_finishes(tmp_path / "run", whole)


def test_a_read_only_folder(config: Config, home: Path, stopped: Path, whole: bytes) -> None:
    """Where this user may not write: one sentence, before any work."""
    closed, mine = home / "closed", home / "mine"
    closed.mkdir(mode=0o555)
    shutil.copytree(stopped, mine)

    def as_nobody(work: Callable[[], Any]) -> Callable[[], Any]:
        def drop() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)
            work()

        return drop

    assert in_a_process(as_nobody(lambda: train(config, closed / "run"))) == 2
    assert list(closed.iterdir()) == []
    if os.geteuid() == 0:  # a run of someone else
        assert in_a_process(as_nobody(lambda: resume(mine))) == 2
    assert_finishes(mine, whole)


# Time and versions.


def test_a_clock_that_goes_backwards(
    config: Config, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    train(config, tmp_path / "run")
    assert model(tmp_path / "run") == whole


def test_a_checkpoint_of_another_version(run: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpformer.__version__", "9.9.9")
    with pytest.raises(DpformerError, match=r"was made with dpformer .*, this is 9.9.9; resume with that version"):
        resume(run)
    monkeypatch.undo()
    assert_finishes(run, whole)


# Poisoned users.


def poisoned(path: Path, lines: list[str]) -> Path:
    write_log(path)
    path.write_text(path.read_text() + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("when", ["nan", "inf", "-inf", "1e999", "", "yesterday"])
def test_a_timestamp_that_is_no_time(tmp_path: Path, when: str) -> None:
    log = poisoned(tmp_path / "log.csv", [f"evil,i1,{when}"])
    row = len(log.read_text().splitlines())
    said = f"'{when}' is not a time" if when else "is missing"
    with pytest.raises(DpformerError, match=rf"log.csv, row {row}: the timestamp {said}; give numbers such as seconds"):
        train(tiny_config(log), tmp_path / "run")
    assert not (tmp_path / "run").exists()


POISON = {
    "huge ids": [f"{10**40},i{n},{n}" for n in range(9)],
    "an id of 10⁵ letters": [f"{'x' * 10**5},i{n},{n}" for n in range(9)],
    "a history of 10⁵ items": [f"evil,i{n % 20},{n}" for n in range(10**5)],
    "one item 10⁴ times": [f"evil,i3,{n}" for n in range(10**4)],
    "times of all sizes": [f"evil,i{n},{(-1) ** n * 10 ** (2 * n)}" for n in range(9)],
    "one item": ["evil,i3,0"],
}


@pytest.mark.parametrize("poison", sorted(POISON))
def test_a_poisoned_user_is_one_user(tmp_path: Path, poison: str) -> None:
    """With that user or without, the clipped sum differs by no more than the clip norm."""
    with_, without = (
        load_dataset(tiny_config(poisoned(tmp_path / f"{name}.csv", lines), validation=False))
        for name, lines in (("with", POISON[poison]), ("without", []))
    )
    assert with_.num_users == without.num_users + 1 and list(with_.vocabulary.ids) == list(without.vocabulary.ids)
    config = tiny_config(tmp_path / "with.csv", dropout=0.0).resolve(users=with_.num_users, threads=1)
    sums = [gradient_sum(config, data) for data in (with_, without)]
    distance = float((sums[0] - sums[1]).norm())
    assert distance <= config.clip_norm * (1 + 1e-4), distance
    train(tiny_config(tmp_path / "with.csv", epochs=1), tmp_path / "run")


def gradient_sum(config: Config, data: Dataset) -> torch.Tensor:
    plan = make_plan(config, data.num_users)
    frequencies = torch.full((data.num_items,), 0.1, dtype=torch.float64)
    network = build_model(config, plan, data.num_items, frequencies, SecureRandom("test", seed=0))
    trainer = make_trainer(config, plan, data, network, SecureRandom("test", seed=0))
    trainer.add_gradients(Batch(np.arange(data.num_users), 0, trainer.batches.origin))
    return torch.cat([p.grad.flatten() for p in trainer.parameters if p.grad is not None])
