"""What a private list of items costs in accuracy: the same data with a public list, and with a released one.

    DPFORMER_DATA=FOLDER python -m experiments.items_cost [--seeds 0 1] [--only WORD …]

One JSON line a run: items of the model, how many held-out items are among them, and NDCG@10 and HIT@10 in %, seen items
masked; a held-out item that is not in the model is missed. Runs are seeded, to be repeated: they promise nothing.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from dpformer.data import read
from dpformer.evaluation import hit, ndcg
from dpformer.kinds.ranking import served_ranks
from dpformer.runs import Config, load_dataset, train
from dpformer.runs.tasks.recommend import vocabulary_of

DATA = {"MovieLens-1M": "ml-1m.txt", "Amazon Games": "amazon-games.txt", "MovieLens-100K": "ml-100k/u.data"}
LISTS = ("released", "catalog", "assumed public")
NETWORK: dict[str, Any] = {"model": "transformer", "epochs": 5}


def measured(data: str, model: str, epsilon: float, items: str, seed: int) -> dict[str, Any]:
    """One run and its accuracy."""
    choices: dict[str, Any] = {"file": Path(os.environ["DPFORMER_DATA"]) / DATA[data], "epsilon": epsilon, "seed": seed}
    choices |= NETWORK if model == "transformer" else {"model": "counts"}
    with tempfile.TemporaryDirectory() as folder:
        if items == "catalog":
            choices["catalog"] = Path(folder) / "items.txt"
            choices["catalog"].write_text("\n".join(read(choices["file"]).item_ids) + "\n")
        config = Config.make(**choices, assume_items_public=items == "assumed public", threads=1)
        run = train(config, Path(folder) / "run")
        dataset = load_dataset(run.config)
        known = vocabulary_of(run.release)
        ranks = served_ranks(run.release.model, dataset, vocabulary=known).ranks
    held_out = known.match([dataset.vocabulary.ids[item] for item in dataset.test_items.tolist()])
    return {
        "items": len(known),
        "held out and known": round(100 * float((held_out >= 0).mean()), 1),
        "ndcg@10": round(100 * float(ndcg(ranks, 10)), 2),
        "hit@10": round(100 * float(hit(ranks, 10)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--only", nargs="*", default=[""], help="runs whose names hold one of these")
    arguments = parser.parse_args()
    runs = [("counts", data, epsilon) for data in DATA for epsilon in (5.0, 10.0)]
    runs += [("transformer", "MovieLens-100K", epsilon) for epsilon in (5.0, 10.0)]
    for model, data, epsilon in runs:
        for items in LISTS:
            name = f"{model}, {data}, {epsilon:g}, {items}"
            for seed in arguments.seeds if any(word in name for word in arguments.only) else []:
                facts = {"run": name, "seed": seed, **measured(data, model, epsilon, items, seed)}
                print(json.dumps(facts, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
