"""Accuracy by ε, for `dpformer epsilon` and its page, from the store: python -m experiments.choosing

Missing runs: DPFORMER_DATA=FOLDER python -m experiments.fill counts-eps
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from experiments.cells import CHOICES, CHOSEN, TITLES, USERS, counts
from experiments.store import ROOT
from experiments.tables import last, markdown, pair, results

MEASURED = ROOT / "src" / "dpformer" / "accounting" / "measured.json"
METRIC = "ndcg@10"


def measured() -> dict[str, Any]:
    """The table as the product has it."""
    return {
        "metric": METRIC,
        "model": "transition counts; δ = 1 / users, public list of items, seen items left out",
        "command": "DPFORMER_DATA=FOLDER python -m experiments.fill counts-eps",
        "data": {TITLES[data]: _of(data) for data in CHOSEN if results(lambda s, d=data: counts(d, math.inf, s))},
    }


def _of(data: str) -> dict[str, Any]:
    (whole,) = results(lambda seed: counts(data, math.inf, seed))
    by_epsilon = {}
    for epsilon in (*CHOICES, 5, 10):
        values = [last(result)[METRIC] for result in results(lambda seed, e=epsilon: counts(data, e, seed))]
        if values and math.isfinite(epsilon):
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            by_epsilon[f"{epsilon:g}"] = {"mean": statistics.mean(values), "deviation": spread, "seeds": len(values)}
    ordered = dict(sorted(by_epsilon.items(), key=lambda item: float(item[0])))
    popular = whole["popularity"]["masked"][METRIC]
    return {"users": USERS[data], "without_noise": last(whole)[METRIC], "popularity": popular, "by_epsilon": ordered}


def table() -> str:
    """The same as text: NDCG@10 / HIT@10 in %, and the share of NDCG@10 without noise."""
    rows = []
    for data in CHOSEN:
        facts = measured()["data"].get(TITLES[data])
        if facts is None:
            continue
        cells = [f"{TITLES[data]} ({USERS[data]:,} users)"]
        for epsilon in CHOICES:
            found = [last(result) for result in results(lambda seed, e=epsilon, d=data: counts(d, e, seed))]
            share = statistics.mean(point[METRIC] for point in found) / facts["without_noise"] if found else 0.0
            kept = f" ({share:.0%})" if found and math.isfinite(epsilon) else ""
            cells.append(f"{pair(found)}{kept}" if found else "–")
        rows.append([*cells, f"{100 * facts['popularity']:.2f}"])
    head = ["", *(f"ε = {epsilon:g}" if math.isfinite(epsilon) else "without noise" for epsilon in CHOICES)]
    return markdown([*head, "popularity"], rows)


def main(path: Path = MEASURED) -> None:
    path.write_text(json.dumps(measured(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
