"""Edges of the command line: each was a traceback, or never ended."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dpformer.errors import DpformerError, out_of_memory
from dpformer.findings import Finding, run_check
from tests.tiny_runs import copied, refused, tiny_run

BUDGETS = {
    "train": (),
    "plan of counts": ("--dry-run", "--users", "200"),
    "plan of a network": ("--dry-run", "--users", "200", "--items", "20", "--model", "transformer"),
    "calibrate": ("--users", "200", "--batch", "50"),
    "tune": ("--try", "dim=8,16", "--assume-items-public", "--dry-run", "--users", "200"),
    "audit": ("--users", "200", "--batch", "50", "--epochs", "1"),
}


@pytest.mark.parametrize("epsilon", ["1e308", "1e9", "1e-9", "1e-320"])
@pytest.mark.parametrize("name", BUDGETS)
def test_an_epsilon_for_which_nothing_is_worked_out(name: str, epsilon: str, tmp_path: Path) -> None:
    command = "train" if name.startswith("plan") else name
    out = ("--out", tmp_path / "run") if name == "train" else ()
    assert "it must be within 0.001 … 10000" in refused(command, "--epsilon", epsilon, *BUDGETS[name], *out)
    assert not (tmp_path / "run").exists()


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """The disk is full after so many bytes of a file."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("name", ["found.parquet", "found.csv", "found.jsonl"])
def test_a_disk_that_fills_up_under_recommendations(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    run, histories = tiny_run(tmp_path_factory), tmp_path / "histories.jsonl"
    rows = [{"user_id": f"{user:0100}", "history": ["i1"]} for user in range(4000)]
    histories.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with small_files(20_000):
        said = refused("recommend", run, "--histories", histories, "--out", tmp_path / name)
    assert said.startswith(f"{tmp_path / name} cannot be written")
    assert os.listdir(tmp_path) == ["histories.jsonl"], "nothing half-written"


def huge(path: Path) -> Path:
    """Three gigabytes that take no room on the disk."""
    path.touch()
    os.truncate(path, 3 << 30)
    return path


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("privacy.json", "report"),
        ("config.toml", "report"),
        ("metrics.jsonl", "report"),
        ("privacy.json", "evaluate"),
        ("audit.json", "card"),
    ],
)
def test_a_huge_file_in_a_folder_is_not_read(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str, command: str
) -> None:
    """`report` read it all, and said that there is not enough memory."""
    run = copied(tiny_run(tmp_path_factory), tmp_path)
    huge(run / name)
    said = refused(command, run)
    assert said.startswith(str(run / name)) and "it is larger than" in said


def test_a_huge_ledger_is_not_read(tmp_path: Path) -> None:
    ledger = huge(tmp_path / "budget.json")
    assert "it is larger than 67,108,864 bytes" in refused("ledger", ledger)
    assert "it is larger than" in refused("train", "--ledger", ledger, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_memory_that_runs_out_says_nothing_about_a_run() -> None:
    """`verify` found "does NOT hold" where a machine was too small: exit code 1 instead of 2."""

    def the_model() -> Finding:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(DpformerError, match="out of memory while checking the model"):
        run_check(the_model)
    assert out_of_memory(ImportError("libtorch_cpu.so: failed to map segment from shared object"))
    assert out_of_memory(OSError(12, "Cannot allocate memory")) and not out_of_memory(ValueError("no"))
