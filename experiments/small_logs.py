"""Counts with attributes on small logs, beside what is public alone: users drawn from Beauty and MovieLens-1M.

    DPFORMER_DATA=FOLDER python -m experiments.small_logs beauty --users 500 1000 --epsilon 0.5 1 --seeds 10

One JSON line per release: NDCG@10 in % of the counts, of counts with attributes, and of the public attributes alone
(ε = 0), for the same 2,000 users, who are drawn once. δ = 1/users. A seed draws the users of the log and the noise.
"""

import argparse
import json

import numpy as np
from experiments.attributes import SETS

import dpformer as dp
from dpformer.data import Attributes, Dataset
from dpformer.evaluation import evaluate, ndcg
from dpformer.kinds.ranking import ranker
from dpformer.models import TransitionCounts

JUDGED = 1000


def some(dataset: Dataset, users: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The training items of a random part of the users, and their offsets."""
    items, offsets = dataset.packed_train()
    chosen = np.random.default_rng(seed).choice(dataset.num_users, min(users, dataset.num_users), replace=False)
    rows = [items[offsets[user] : offsets[user + 1]] for user in np.sort(chosen)]
    return np.concatenate(rows), np.cumsum([0, *map(len, rows)])


def accuracy(model: TransitionCounts, dataset: Dataset, split: str, judged: np.ndarray) -> float:
    return round(100 * float(ndcg(evaluate(ranker(model), dataset, split=split, users=judged).served, 10)), 3)


def measure(
    dataset: Dataset, attributes: Attributes, users: int, epsilon: float, seed: int, split: str, judged: np.ndarray
) -> dict[str, float]:
    """NDCG@10 of counts, and of counts with attributes."""
    items, offsets = some(dataset, users, seed)
    sigma = dp.calibrate(epsilon=epsilon, delta=1 / users, sample_rate=1.0, steps=1)
    models = {
        name: TransitionCounts.fit(
            items, dataset.num_items, sigma, offsets=offsets, attributes=known, ledger=dp.Ledger(), seed=seed
        )
        for name, known in (("counts", None), ("attributes", attributes))
    }
    return {name: accuracy(model, dataset, split, judged) for name, model in models.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=[name for name in SETS if name != "games"])
    parser.add_argument("--users", type=int, nargs="+", default=[500, 1000, 2000, 5000])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 1.0, 2.0, 5.0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--validation", action="store_true")
    chosen = parser.parse_args()
    dataset, attributes = SETS[chosen.data]()
    assert attributes is not None
    dataset = Dataset(dataset.items, dataset.offsets, dataset.user_ids, dataset.vocabulary, None, chosen.validation)
    split = "validation" if chosen.validation else "test"
    everyone = dataset.held_out(split)[0]
    judged = np.random.default_rng(0).choice(everyone, min(JUDGED, len(everyone)), replace=False)
    public = accuracy(TransitionCounts.from_public(attributes), dataset, split, judged)
    for seed in range(chosen.seeds):
        for users in chosen.users:
            for epsilon in chosen.epsilon:
                facts = {"data": chosen.data, "split": split, "users": users, "epsilon": epsilon, "seed": seed}
                found = measure(dataset, attributes, users, epsilon, seed, split, judged)
                print(json.dumps({**facts, "public": public, **found}), flush=True)


if __name__ == "__main__":
    main()
