"""Transition counts on real data: DPFORMER_DATA=FOLDER python -m experiments.counts [--seeds 3]

Every run is one release under (ε, 1/users)-DP and the evaluation of the model read off it: there are no epochs to
choose from. Runs go to docs/results/counts.json as they finish, and what is there is not run again; the table in
docs/results/counts.md is made from it. Seeded, so that numbers can be made again: such a run is marked as not private.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import dpformer as dp
from dpformer.data import Dataset, prepare
from dpformer.evaluation import evaluate, hit, ndcg
from dpformer.models.counts import TransitionCounts

FILES = {"MovieLens-1M": "ml-1m.txt", "Games": "amazon-games.txt", "MovieLens-100K": "ml-100k/u.data"}
EPSILONS = (5, 10, 8)
RESULTS = Path(__file__).parents[1] / "docs" / "results"
WHOLE = 10**9  # histories are not cut: a user counts as one, however long


def run(dataset: Dataset, epsilon: float, seed: int) -> dict[str, Any]:
    """One release, and what a ranking by it, and by its popularity alone, is worth."""
    delta = 1 / dataset.num_users
    sigma = dp.calibrate(epsilon=epsilon, delta=delta, sample_rate=1.0, steps=1)
    items, offsets = dataset.packed_train()
    ledger, start = dp.Ledger(), time.perf_counter()
    model = TransitionCounts.fit(items, dataset.num_items, sigma, offsets=offsets, ledger=ledger, seed=seed)
    seconds = time.perf_counter() - start
    return {
        "noise_multiplier": sigma,
        "epsilon_spent": ledger.epsilon(delta),
        "seconds": round(seconds, 1),
        "transitions": model.num_transitions,
        "counts": metrics(model.scores, dataset),
        "popularity": metrics(lambda histories: model.popularity.expand(len(histories), -1), dataset),
    }


def metrics(score: Any, dataset: Dataset) -> dict[str, float]:
    """NDCG@10 and HIT@10 in %, items already met masked or not."""
    found = evaluate(score, dataset)
    return {
        f"{name} {policy}": 100 * float(function(ranks, 10).mean())
        for policy, ranks in (("masked", found.masked), ("unmasked", found.unmasked))
        for name, function in (("ndcg@10", ndcg), ("hit@10", hit))
    }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Markdown: one line a data set, ε and model; mean ± deviation over seeds."""
    lines = [
        "| data | ε | model | NDCG@10 | HIT@10 | NDCG@10, unmasked | HIT@10, unmasked | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in FILES:
        for epsilon in sorted(EPSILONS):
            group = [runs[key] for key in sorted(runs) if key.startswith(f"{name} {epsilon} ")]
            for model in ("popularity", "counts") if group else ():
                cells = [_cell([one[model][f"{m} {p}"] for one in group]) for p, m in COLUMNS]
                lines.append(f"| {name} | {epsilon} | {model} | {' | '.join(cells)} | {len(group)} |")
    return "\n".join(lines)


COLUMNS = [(policy, name) for policy in ("masked", "unmasked") for name in ("ndcg@10", "hit@10")]


def _cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store, page = arguments.out / "counts.json", arguments.out / "counts.md"
    runs = json.loads(store.read_text()) if store.exists() else {}
    datasets: dict[str, Dataset] = {}
    for seed in range(arguments.seeds):
        for epsilon in EPSILONS:
            for name, file in FILES.items():
                key = f"{name} {epsilon} {seed}"
                if key in runs:
                    continue
                if name not in datasets:
                    datasets[name] = prepare(Path(os.environ["DPFORMER_DATA"]) / file, max_length=WHOLE)
                runs[key] = run(datasets[name], epsilon, seed)
                store.write_text(json.dumps(runs, indent=1) + "\n")
                print(key, {k: round(v, 2) for k, v in runs[key]["counts"].items()}, flush=True)
    before, _, after = (
        page.read_text().partition("<!-- table -->") if page.exists() else ("# Transition counts\n", "", "")
    )
    after = after.partition("<!-- end of table -->")[2]
    page.write_text(f"{before}<!-- table -->\n{table(runs)}\n<!-- end of table -->{after or chr(10)}")


if __name__ == "__main__":
    main()
