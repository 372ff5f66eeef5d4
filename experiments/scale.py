"""When does a network win? Counts and Transformers by the number of users: python -m experiments.scale [WORD ...]

Made-up logs of some users and items with short histories, at ε = 5 and the list of items public: transition counts, a
Transformer, and one started from counts with half of the budget. A Transformer gets about as many steps at every size,
in batches that grow with the users, which is what more users are good for. Accuracy is that of 2,000 users' last items.
One JSON record a run in docs/results/scale.json, never computed twice; WORDs choose runs. Draws scale.svg.
"""

import argparse
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from experiments.store import ROOT, metrics

from dpformer.evaluation import popularity
from dpformer.evaluation.evaluate import scorer
from dpformer.runs import Config, train
from dpformer.runs.tasks import load_dataset

STORE = ROOT / "docs" / "results" / "scale.json"
SIZES = (  # users, items
    (1_000, 100), (6_000, 400), (6_000, 1_500), (3_000, 200), (20_000, 1_000), (1_000, 1_000), (1_000, 10_000),
    (10_000, 1_000), (10_000, 10_000), (100_000, 1_000), (100_000, 10_000), (1_000_000, 1_000), (1_000_000, 10_000),
)  # fmt: skip
GENRE = 33  # items; the embedded synthetic data has as many
STAY, FOLLOW, SERIES = 0.45, 0.40, (0.20, 0.10, 0.05)  # as there
SHORTEST, LONGEST = 6, 16
JUDGED = 2_000  # users
EPSILON, DROPOUT = 5.0, 0.1
# users → epochs and batch of networks: 200 to 400 steps, as far as 10⁶ visits reach
STEPS = {
    1_000: (100, 250),
    3_000: (60, 600),
    6_000: (40, 1_024),
    20_000: (20, 2_048),
    10_000: (40, 1_024),
    100_000: (5, 2_048),
    1_000_000: (1, 8_192),
}
NETWORK: dict[str, Any] = {"model": "transformer", "reattention": False, "max_length": LONGEST, "dropout": DROPOUT}
MODELS: dict[str, dict[str, Any]] = {
    "counts": {"model": "counts"},
    "transformer": NETWORK,
    "transformer started from counts": {**NETWORK, "warm_start": 0.5, "learning_rate": 2e-3},
}


def log(users: int, items: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Users and items of a log, user by user, in order: walks through genres in a circle that meet no item twice.

    The law is that of the embedded synthetic data, drawn piece by piece, so that no table of items × items is needed.
    """
    rng = np.random.default_rng(seed)
    weights = rng.permutation((np.arange(items) + 8.0) ** -1.3)
    running = np.concatenate([[0.0], np.cumsum(weights)])  # a genre is a stretch of it
    walks = np.full((users, LONGEST), -1, dtype=np.int64)
    walks[:, 0] = _draw(rng, running, np.zeros(users, int), np.full(users, items))
    for step in range(1, LONGEST):
        left = np.arange(users)
        for attempt in range(50):  # what was met is drawn again; in the end from everywhere
            walks[left, step] = _next(rng, running, walks[left, step - 1], anywhere=attempt > 20)
            left = left[(walks[left, :step] == walks[left, step, None]).any(axis=1)]
    lengths = rng.integers(SHORTEST, LONGEST + 1, users)
    kept = np.arange(LONGEST) < lengths[:, None]
    return np.repeat(np.arange(users), lengths), walks[kept]


def _next(rng: np.random.Generator, running: np.ndarray, last: np.ndarray, *, anywhere: bool) -> np.ndarray:
    """One more item for each user, given the last one."""
    items, draw = len(running) - 1, rng.random(len(last)) * (0 if anywhere else 1)
    genres = items // GENRE
    stay, follow = draw > 1 - STAY, (draw > 1 - STAY - FOLLOW) & (draw <= 1 - STAY)
    genre = np.minimum(last // GENRE, genres - 1)
    genre = np.where(follow, (genre + 1) % genres, genre)
    inside = stay | follow
    low, high = np.where(inside, genre * GENRE, 0), np.where(inside, genre * GENRE + GENRE, items)
    found = _draw(rng, running, low, high)
    ahead = np.searchsorted(np.cumsum(SERIES), rng.random(len(last))) + 1  # 4: none of the series
    following = low + (last - low + ahead) % GENRE
    return np.where(stay & (ahead <= len(SERIES)), following, found)


def _draw(rng: np.random.Generator, running: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Items of [low, high) by popularity."""
    at = running[low] + rng.random(len(low)) * (running[high] - running[low])
    return np.clip(np.searchsorted(running, at, side="right") - 1, low, high - 1)


def write_log(path: Path, users: int, items: int) -> None:
    user, item = log(users, items)
    pq.write_table(pa.table({"user_id": user, "item_id": item, "timestamp": np.arange(len(user))}), path)


def compute(users: int, items: int, model: str) -> dict[str, Any]:
    """One run: what was chosen, and accuracy of the model and of popularity."""
    choices = dict(MODELS[model])
    if model != "counts":
        choices["epochs"], choices["batch_size"] = STEPS[users]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.parquet"
        write_log(path, users, items)
        config = Config.make(file=path, epsilon=EPSILON, assume_items_public=True, seed=0, threads=1, **choices)
        began = time.process_time()
        run = train(config, Path(folder) / "run")
        seconds, dataset = time.process_time() - began, load_dataset(run.config)
        judged = np.arange(min(JUDGED, users))
        return {
            "users": users, "items": items, "model": model, "choices": choices, "delta": run.statement["delta"],
            "accuracy": metrics(scorer(run.release.model), dataset, judged)["masked"],
            "popularity": metrics(popularity(dataset), dataset, judged)["masked"],
            "cpu_seconds": round(seconds, 1),
        }  # fmt: skip


def draw() -> None:
    """scale.svg: accuracy by users an item, counts beside the Transformer wherever both were measured."""
    import matplotlib.pyplot as plt
    from experiments.plots import save

    found: dict[tuple[int, int], dict[str, float]] = {}
    for run in stored().values():
        found.setdefault((run["users"], run["items"]), {})[run["model"]] = 100 * run["accuracy"]["ndcg@10"]
    both = sorted((users / items, users, items, each) for (users, items), each in found.items() if len(each) > 1)
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for place, (_, _, _, each) in enumerate(both):
        axis.plot([place, place], [each["counts"], each["transformer"]], color="#999999", linewidth=1)
    for model, colour, marker in (("counts", "#2b6777", "o"), ("transformer", "#b5452c", "s")):
        values = [each[model] for *_, each in both]
        axis.plot(range(len(both)), values, marker, color=colour, label=model)
    names = [f"{users:,} × {items:,}\n{ratio:g} an item" for ratio, users, items, _ in both]
    axis.set_xticks(range(len(both)), names, fontsize=8)
    axis.set(xlabel="users × items of a made-up log", ylabel="NDCG@10, %", ylim=(0, None))
    axis.legend(frameon=False)
    save(figure, STORE.with_suffix(".svg"))


def stored() -> dict[str, dict[str, Any]]:
    return json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    for (users, items), model in product(SIZES, MODELS):
        name = f"{users} users, {items} items, {model}"
        if name in stored() or not all(word in name for word in arguments.words):
            continue
        print(name, flush=True)
        found = compute(users, items, model)
        STORE.write_text(json.dumps({**stored(), name: found}, indent=1) + "\n", encoding="utf-8")
        print(found["accuracy"], "popularity", found["popularity"], found["cpu_seconds"], flush=True)
    draw()


if __name__ == "__main__":
    main()
