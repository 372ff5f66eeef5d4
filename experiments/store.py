"""The store of results: one JSON file a run under docs/results/runs/, never computed twice.

A run that is not finished lives in a run folder under .experiments/ (private, not committed) and is resumed from its
checkpoint. Several processes may fill the store at the same time: each run is locked by the one that computes it.

    cell, data, seed, ablation, config, epsilon, delta, seconds      what was run
    revision, build, date    of the checkout, of what is in src/ (results of one build are comparable), of the end
    curve        one record an evaluation, the last one is that of the released model: step, epoch, training_loss, and
                 masked and unmasked NDCG@10 and HIT@10, or of text its loss
    popularity   of counts: the same metrics of the popularity that is part of the release
    tail         of the floor: how many users have the r-th most popular item
"""

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from experiments.ablation import changed
from experiments.cells import FILES, Cell, data_file

from dpformer.data import Dataset
from dpformer.evaluation import evaluate, hit, ndcg, popularity
from dpformer.kinds.network import OF_NETWORKS
from dpformer.kinds.ranking import ranker
from dpformer.models.counts import TransitionCounts
from dpformer.runs import resume, train
from dpformer.runs.config import Config
from dpformer.runs.run import Run
from dpformer.runs.tasks import load_dataset

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "docs" / "results" / "runs"
WORK = ROOT / ".experiments"
LOCAL = ("file", "cache", "catalog", "tokenizer")  # paths of this machine: not part of a result


def load(name: str) -> dict[str, Any] | None:
    """The result of a cell, None if it has not been run."""
    path = RUNS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def fill(cell: Cell, threads: int) -> dict[str, Any] | None:
    """Run or resume a cell and store the result; None if another process is running it."""
    with _locked(cell.name) as mine:
        if not mine or load(cell.name) is not None:
            return load(cell.name)
        result = _train(cell, threads) if cell.trains else _floor(cell)
        result = {"cell": cell.name, "data": cell.data, "seed": cell.seed, **result, **BUILD, "date": _today()}
        RUNS.mkdir(parents=True, exist_ok=True)
        partial = RUNS / f".{cell.name}.tmp"
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in result.items())
        partial.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        partial.replace(RUNS / f"{cell.name}.json")
        return result


def _train(cell: Cell, threads: int) -> dict[str, Any]:
    folder, began = WORK / cell.name, time.time()
    started = (folder / "config.toml").exists()
    with changed(cell.ablation):
        run = resume(folder) if started else train(cell.config().replace(threads=threads), folder)
    seconds = time.time() - began
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "seconds" in record]
    values = json.loads(run.config.model_dump_json(exclude=set(LOCAL if steps else (*LOCAL, *OF_NETWORKS))))
    facts = ("epsilon", "delta", "noise_multiplier", "sample_rate", "steps")
    return {
        **({"ablation": cell.ablation} if cell.ablation else {}),
        "config": {name: value for name, value in values.items() if value is not None},
        **{name: run.statement[name] for name in facts if run.statement[name] is not None},
        **(_curve(records) if steps else _released(run)),
        "seconds": round(sum(record["seconds"] for record in steps) or seconds, 1),
    }


def _curve(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The evaluations during training, each with the loss of the step before it."""
    curve, loss = [], None
    for record in records:
        if "split" in record:
            kept = {name: value for name, value in record.items() if name != "covered"}
            curve.append({**kept, "training_loss": loss and round(loss, 4)})
        else:
            loss = record.get("loss") or loss
    return {"curve": curve}


def _released(run: Run) -> dict[str, Any]:
    """A model without steps: the release is its only iterate."""
    model, dataset = run.release.model, load_dataset(run.config)
    found = {"curve": [{"step": 0, "epoch": 0, "split": "test", **metrics(ranker(model), dataset)}]}
    if isinstance(model, TransitionCounts):
        q = model.popularity
        found["popularity"] = metrics(lambda histories: q.expand(len(histories), -1), dataset)  # type: ignore[assignment]
    return found


def _floor(cell: Cell) -> dict[str, Any]:
    file = data_file(cell.data) if cell.data in FILES else None
    dataset, began = load_dataset(Config.make(file=file, model="counts")), time.time()  # whole histories
    items, offsets = dataset.packed_train()
    pairs = np.unique(np.repeat(np.arange(dataset.num_users), np.diff(offsets)) * dataset.num_items + items)
    users = np.sort(np.bincount(pairs % dataset.num_items, minlength=dataset.num_items))[::-1]
    ranks = np.unique(np.geomspace(1, dataset.num_items, 200).astype(int))
    return {
        "curve": [{"step": 0, "epoch": 0, "split": "test", **metrics(popularity(dataset), dataset)}],
        "users": dataset.num_users,
        "items": dataset.num_items,
        "tail": [[int(rank), int(users[rank - 1])] for rank in ranks],
        "seconds": round(time.time() - began, 1),
    }


def metrics(score: Any, dataset: Dataset, users: np.ndarray | None = None) -> dict[str, dict[str, float]]:
    """policy → metric → value, on test items, of all users or these."""
    found = evaluate(score, dataset, users=users)
    return {
        policy: {"ndcg@10": float(ndcg(ranks, 10).mean()), "hit@10": float(hit(ranks, 10).mean())}
        for policy, ranks in (("masked", found.masked), ("unmasked", found.unmasked))
    }


def _build() -> dict[str, str]:
    """The commit of the checkout, and the last one that changed the product: experiments may move on beside it."""
    asked = {"revision": ("describe", "--always", "--dirty"), "build": ("log", "-1", "--format=%h", "--", "src")}
    return {
        name: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for name, words in asked.items()
    }


BUILD = _build()  # when the process starts: the code that it computes with


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


@contextmanager
def _locked(name: str) -> Iterator[bool]:
    WORK.mkdir(exist_ok=True)
    lock = os.open(WORK / f"{name}.lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(lock)
