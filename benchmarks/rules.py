"""What rules at request time cost beside a ranking without them, for a large catalogue.

    python -m benchmarks.rules [--items 100000] [--rounds 200]

The same row of scores is ranked with each rule in turns; the times are medians per request. The model's own scores are
not part of it.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from dpformer.data.catalog_columns import CatalogColumns, _column
from dpformer.serving.rules import RuleBook, Rules


class _Items:
    def __init__(self, count: int) -> None:
        self.vocabulary = [f"sku-{item}" for item in range(count)]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--items", type=int, default=100_000)
    asked.add_argument("--rounds", type=int, default=200)
    given = asked.parse_args()
    random = np.random.default_rng(0)
    drawn = {"category": random.zipf(1.3, given.items) % 500, "brand": random.integers(0, 5_000, given.items)}
    columns = {name: _column(name, [str(value) for value in values]) for name, values in drawn.items()}
    columns["price"] = _column("price", [f"{value:.2f}" for value in random.lognormal(3, 1, given.items)])
    items = _Items(given.items)
    book = RuleBook(items, CatalogColumns(columns))  # type: ignore[arg-type]
    listed = [items.vocabulary[item] for item in random.choice(given.items, 10_000, replace=False)]
    rules = {
        "none": Rules(),
        "exclude 10,000 ids": Rules(exclude=listed),
        "allow 10,000 ids": Rules(items=listed),
        "where category": Rules(where={"category": "1"}),
        "where price": Rules(where={"price": {"min": 10, "max": 50}}),
        "max_per category 2": Rules(max_per={"category": 2}),
        "max_per category 2, brand 1": Rules(max_per={"category": 2, "brand": 1}),
    }
    scores = random.standard_normal((1, given.items)).astype(np.float32)
    scores[0] += 2 * (drawn["category"] == 1)  # the best are of one category, the hard case for max_per
    taken: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(given.rounds):
        for name, rule in rules.items():
            row = scores.copy()
            began = time.perf_counter()
            book.bind(rule).choose(row, 10)
            taken[name].append(time.perf_counter() - began)
    for name, seconds in taken.items():
        print(f"{name:30} {1e3 * np.median(seconds):7.3f} ms")


if __name__ == "__main__":
    main()
