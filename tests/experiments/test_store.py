"""The store of experiments: interrupted and resumed, never computed twice, filled by several processes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from experiments.cells import Cell

from dpformer.training.trainer import Trainer
from experiments import ablation, cells, store
from tests.distributed.jobs import CONTEXT
from tests.training.logs import write_log
from tests.training.memo import remember

NETWORK: dict[str, Any] = {
    "epsilon": 4.0, "model": "transformer", "reattention": False, "batch_size": 20, "epochs": 4, "dim": 8, "blocks": 1,
    "max_length": 6, "evaluate_every": 2, "checkpoint_seconds": 0.0, "assume_items_public": True,
}  # fmt: skip
COUNTS: dict[str, Any] = {"model": "counts", "epsilon": 5.0, "assume_items_public": True}


def place(folder: Path) -> None:
    """A data set called tiny, and a store, both in a folder."""
    if not (folder / "log.csv").exists():  # another process may be reading it
        write_log(folder / "log.csv")
    cells.FILES["tiny"] = "log.csv"
    store.RUNS, store.WORK = folder / "runs", folder / "work"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module, name in ((store, "RUNS"), (store, "WORK")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    monkeypatch.setitem(cells.FILES, "tiny", "")
    monkeypatch.setenv("DPFORMER_DATA", str(tmp_path))
    remember(monkeypatch.setattr)
    place(tmp_path)
    return tmp_path


def test_a_run_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("tiny", "network", NETWORK)
    first = store.fill(cell, 1)
    assert first is not None and [point["epoch"] >= 2 for point in first["curve"]] == [True, True]
    assert first["epsilon"] <= 4 and first["config"]["dim"] == 8 and "file" not in first["config"]
    assert str(folder) not in (folder / "runs" / f"{cell.name}.json").read_text(), "no paths of this machine"
    monkeypatch.setattr(store, "train", lambda *_: pytest.fail("computed twice"))
    monkeypatch.setattr(store, "resume", lambda *_: pytest.fail("computed twice"))
    assert store.fill(cell, 1) == first == store.load(cell.name)


def test_an_interrupted_run_goes_on_to_the_same_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = store.fill(Cell("tiny", "whole", NETWORK), 1)
    advance = Trainer.advance

    def power_cut(trainer: Trainer) -> dict[str, Any]:
        if trainer.step == 7:
            raise KeyboardInterrupt
        return advance(trainer)

    cell = Cell("tiny", "cut", NETWORK)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", power_cut)
        with pytest.raises(KeyboardInterrupt):
            store.fill(cell, 1)
    assert store.load(cell.name) is None, "nothing half done is in the store"
    taken: list[int] = []
    monkeypatch.setattr(Trainer, "advance", lambda trainer: (taken.append(trainer.step), advance(trainer))[1])
    again = store.fill(cell, 1)
    assert whole is not None and again is not None
    assert taken == list(range(7, 12)), "steps that were saved are not taken again"
    assert again["curve"] == whole["curve"]


def test_counts_and_popularity_have_one_point(folder: Path) -> None:
    found = store.fill(Cell("tiny", "counts", COUNTS), 1)
    assert found is not None and len(found["curve"]) == 1 and set(found["popularity"]) == {"masked", "unmasked"}
    assert "dim" not in found["config"], "counts have no choices of networks"
    floor = store.fill(Cell("tiny", "popularity"), 1)
    assert floor is not None and "epsilon" not in floor
    users = [users for _, users in floor["tail"]]
    assert floor["items"] == 20 and users == sorted(users, reverse=True)


def test_a_run_that_another_process_computes_is_left_to_it(folder: Path) -> None:
    cell = Cell("tiny", "counts", COUNTS)
    with store._locked(cell.name) as mine:
        assert mine and store.fill(cell, 1) is None
    assert store.fill(cell, 1) is not None


def _fill(folder: Path) -> None:
    os.environ["DPFORMER_DATA"] = str(folder)
    place(folder)
    began = folder / "began"
    train = store.train

    def told(*given: Any) -> Any:
        with began.open("a") as file:
            file.write("x")
        return train(*given)

    store.train = told
    for seed in range(2):
        store.fill(Cell("tiny", "counts", COUNTS, seed), 1)


def test_two_processes_share_the_work(folder: Path) -> None:
    processes = [CONTEXT.Process(target=_fill, args=(folder,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert (folder / "began").read_text() == "xx", "two runs, each computed by one of them"
    assert len(list((folder / "runs").glob("*.json"))) == 2
    assert all(json.loads(path.read_text())["curve"] for path in (folder / "runs").glob("*.json"))


@pytest.mark.parametrize("name", ablation.ABLATIONS)
def test_an_ablation_is_trained_interrupted_resumed_and_named(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is changed in place all along, and nothing left changed."""
    of_literal = {"reattention": True, "reattention_variant": "literal", "frequency_bias": False}
    choices = {**NETWORK, "blocks": 2, **(of_literal if ablation.ABLATIONS[name] == "literal" else {})}
    cell = Cell("tiny", name, choices, ablation=name)
    with monkeypatch.context() as patch:
        advance = Trainer.advance

        def stop(trainer: Trainer) -> Any:
            if trainer.step == 2:
                raise KeyboardInterrupt
            return advance(trainer)

        patch.setattr(Trainer, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            store.fill(cell, 1)
    result = store.fill(cell, 1)
    assert result is not None and result["ablation"] == name and result["config"]["epochs"] == 4
    whole = store.fill(Cell("tiny", f"{name}-whole", choices, ablation=name), 1)
    plain = store.fill(Cell("tiny", f"{name}-plain", choices), 1)
    assert whole is not None and plain is not None and "ablation" not in plain
    assert result["curve"] == whole["curve"], "resumed as if never stopped"
    assert result["curve"][-1]["training_loss"] != plain["curve"][-1]["training_loss"]
