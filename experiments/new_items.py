"""Items in nobody's history: a random tenth is removed from all histories, and is wanted by the users judged.

    DPFORMER_DATA=FOLDER python -m experiments.new_items beauty --epsilon 1 5 --seeds 3

One JSON line per release and model. Judged are users whose test item is one of the removed ones: NDCG@10 in % among all
items, and among the removed ones alone. `vectors` are public too: 64 dimensions of the catalogue's attributes (a random
projection, rarer attributes longer), given to the counts as a column of vectors instead of the attributes themselves.
"""

import argparse
import json

import numpy as np
from experiments.attributes import SETS

import dpformer as dp
from dpformer.data import Attributes, Dataset
from dpformer.data.vectors import near_by
from dpformer.evaluation import evaluate, ndcg
from dpformer.kinds.ranking import ranker
from dpformer.models import TransitionCounts

JUDGED, DIMENSIONS = 400, 64


def as_vectors(attributes: Attributes) -> Attributes:
    """The items' neighbours by vectors made of their attributes."""
    sizes = np.bincount(attributes.links, minlength=len(attributes))
    axes = np.random.default_rng(0).normal(size=(len(attributes), DIMENSIONS)) / np.sqrt(sizes)[:, None]
    vectors = np.zeros((attributes.num_items, DIMENSIONS))
    np.add.at(vectors, attributes.origins, axes[attributes.links])
    return Attributes.of_items(near_by("vector", vectors, [str(item) for item in range(attributes.num_items)]))


def without(dataset: Dataset, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Dataset]:
    """New items (M,) bool; training items without them, and their offsets; the users judged."""
    new = np.random.default_rng(seed).random(dataset.num_items) < 0.1
    items, offsets = dataset.packed_train()
    users = np.repeat(np.arange(dataset.num_users), np.diff(offsets))[~new[items]]
    kept = items[~new[items]]
    offsets = np.searchsorted(users, np.arange(dataset.num_users + 1))
    everyone, targets = dataset.held_out("test")
    judged = [(kept[offsets[u] : offsets[u + 1]], t) for u, t in zip(everyone, targets, strict=True) if new[t]]
    histories = [[*history.tolist(), int(target)] for history, target in judged if len(history) > 1]
    return new, kept, offsets, Dataset.from_histories(histories[:JUDGED], dataset.num_items)


def accuracy(model: TransitionCounts, dataset: Dataset, new: np.ndarray) -> dict[str, float]:
    ranks = evaluate(ranker(model), dataset, split="test").served
    scored = []
    users, targets = dataset.held_out("test")
    for user, target in zip(users.tolist(), targets.tolist(), strict=True):
        history = dataset.items[dataset.offsets[user] : dataset.offsets[user + 1] - 1]
        scores = model.scores([history])[0].numpy()[new]
        rank = int((scores >= model.scores([history])[0, target].item()).sum())
        scored.append(1 / np.log2(rank + 1) if rank <= 10 else 0.0)
    return {"all": round(100 * float(ndcg(ranks, 10)), 3), "new": round(100 * float(np.mean(scored)), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=[name for name in SETS if name != "games"])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--seeds", type=int, default=1)
    chosen = parser.parse_args()
    dataset, attributes = SETS[chosen.data]()
    assert attributes is not None
    kinds = {"counts": None, "attributes": attributes, "vectors": as_vectors(attributes)}
    for seed in range(chosen.seeds):
        new, items, offsets, judged = without(dataset, seed)
        for epsilon in chosen.epsilon:
            sigma = dp.calibrate(epsilon=epsilon, delta=1 / dataset.num_users, sample_rate=1.0, steps=1)
            for name, known in kinds.items():
                model = TransitionCounts.fit(
                    items, dataset.num_items, sigma, offsets=offsets, attributes=known, ledger=dp.Ledger(), seed=seed
                )
                facts = {"data": chosen.data, "epsilon": epsilon, "seed": seed, "model": name}
                users = {"judged": judged.num_users, "new items": int(new.sum())}
                print(json.dumps({**facts, **users, **accuracy(model, judged, new)}), flush=True)


if __name__ == "__main__":
    main()
