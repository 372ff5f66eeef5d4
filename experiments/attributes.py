"""Public attributes of items on real data: counts alone, with attributes, with shuffled ones.

    DPFORMER_DATA=FOLDER python -m experiments.attributes beauty --epsilon 5 --seeds 3            # test items
    DPFORMER_DATA=FOLDER python -m experiments.attributes ml-1m --epsilon 5 --seeds 1 --validation

One JSON line for each model: NDCG@10 and HIT@10 in %, seen items left out, δ = 1/users. Constants were chosen with
`--validation`: the item before the last is the target, and nothing from it on takes part in the release.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import dpformer as dp
from dpformer.data import Attributes, Dataset, prepare, read_catalog
from dpformer.evaluation.metrics import hit, ndcg
from dpformer.kinds.ranking import served_ranks
from dpformer.models import TransitionCounts

DATA = Path(os.environ.get("DPFORMER_DATA", "data"))


def beauty() -> tuple[Dataset, Attributes]:
    """Amazon Beauty: categories and brands, as numbers in one column."""
    return _numbered("s3-beauty")


def yelp() -> tuple[Dataset, Attributes]:
    """Yelp: categories of businesses, as numbers in one column."""
    return _numbered("s3-yelp")


def _numbered(name: str) -> tuple[Dataset, Attributes]:
    with (DATA / f"{name}.txt").open() as file:
        histories = [[int(item) - 1 for item in line.split()[1:]] for line in file]
    facts = json.loads((DATA / f"{name}-attributes.json").read_text())
    num_items = 1 + max(max(history) for history in histories)
    rows = [[("attribute", str(value)) for value in facts.get(str(item + 1), [])] for item in range(num_items)]
    return Dataset.from_histories(histories, num_items), Attributes.of_items(rows)


def movielens() -> tuple[Dataset, Attributes]:
    """MovieLens-1M: genres, year and the words of the title, by way of a catalogue file."""
    numbers = {movie: item for item, movie in _pairs(DATA / "ml-1m-item-ids.txt")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.jsonl"
        with path.open("w") as file:
            for line in (DATA / "ml-1m-movies.dat").read_text(encoding="latin-1").splitlines():
                movie, title, genres = line.split("::")
                if movie in numbers:
                    name, year = title.strip()[:-7], title.strip()[-5:-1]
                    about = {"title": name, "year": int(year), "genre": genres.split("|")}
                    file.write(json.dumps({"item_id": numbers[movie], **about}) + "\n")
        catalog = read_catalog(path)
    dataset = prepare(DATA / "ml-1m.txt")
    assert catalog.attributes is not None
    return dataset, catalog.attributes.of_rows(catalog.match(dataset.vocabulary.ids))


def games() -> tuple[Dataset, None]:
    """Amazon Games: no attributes."""
    return prepare(DATA / "amazon-games.txt"), None


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        item, movie = line.split()
        yield item, movie


SETS = {"beauty": beauty, "yelp": yelp, "ml-1m": movielens, "games": games}


def measure(dataset: Dataset, attributes: Attributes | None, epsilon: float, seed: int, split: str) -> dict[str, float]:
    """One release, one model, the accuracy of it."""
    items, offsets = dataset.packed_train()
    sigma = dp.calibrate(epsilon=epsilon, delta=1 / dataset.num_users, sample_rate=1.0, steps=1)
    model = TransitionCounts.fit(
        items, dataset.num_items, sigma, offsets=offsets, attributes=attributes, ledger=dp.Ledger(), seed=seed
    )
    ranks = served_ranks(model, dataset, split).ranks
    found = {"ndcg@10": 100 * float(ndcg(ranks, 10)), "hit@10": 100 * float(hit(ranks, 10))}
    return {**found, "attributes": model.num_attributes, "backoff": float(model.backoff) if model.num_attributes else 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=SETS)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[5.0, 10.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--models", nargs="+", default=["counts", "attributes", "shuffled"])
    chosen = parser.parse_args()
    dataset, attributes = SETS[chosen.data]()
    dataset = Dataset(dataset.items, dataset.offsets, dataset.user_ids, dataset.vocabulary, None, chosen.validation)
    split = "validation" if chosen.validation else "test"
    for epsilon in chosen.epsilon:
        for seed in range(chosen.seeds):
            for name in chosen.models:
                known = attributes if name != "counts" else None
                if known is not None and name == "shuffled":
                    known = known.of_rows(np.random.default_rng(seed).permutation(dataset.num_items))
                if name == "counts" or known is not None:
                    facts = {"data": chosen.data, "split": split, "epsilon": epsilon, "seed": seed, "model": name}
                    print(json.dumps({**facts, **measure(dataset, known, epsilon, seed, split)}), flush=True)


if __name__ == "__main__":
    main()
