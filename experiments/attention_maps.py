"""Attention maps at ε = 5, 8, 10, vanilla and Re-Attention: DPFORMER_DATA=FOLDER python -m experiments.attention_maps

Reads the released models of finished runs (kept under .experiments/), shows them the last 20 items of five users and
draws who looks at whom in the first block; writes docs/results/attention-ml-1m.svg. Models that are not there are left
out. The users are those of a public data set: with private data, never publish such a figure.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from experiments.cells import EPSILONS, TITLES, data_file
from experiments.literal import long_run
from experiments.plots import NAMES, save
from experiments.store import ROOT, WORK

from dpformer.data import prepare
from dpformer.models import Batch, Transformer
from dpformer.runs import load_release

USERS, LENGTH = 5, 20


def models(data: str) -> dict[tuple[str, float], Transformer]:
    """The released models that are there."""
    found: dict[tuple[str, float], Transformer] = {}
    for model in NAMES:
        for epsilon in EPSILONS:
            path = WORK / long_run(data, model, epsilon, 0).name / "model.safetensors"
            if path.exists():
                found[model, epsilon] = load_release(path).model
    return found


def draw(data: str, path: Path) -> Path | None:
    """Rows: models; columns: users. Attention of the first block, the mean over heads."""
    found = models(data)
    if not found:
        return None
    dataset = prepare(data_file(data), max_length=LENGTH)
    long = np.flatnonzero(dataset.train_lengths == LENGTH)
    users = long[np.linspace(0, len(long) - 1, USERS).astype(int)]
    histories = dataset.histories(users)
    figure, axes = plt.subplots(
        len(found), USERS, figsize=(2 * USERS, 2.1 * len(found)), layout="constrained", squeeze=False
    )
    for row, ((model, epsilon), network) in zip(axes, found.items(), strict=True):
        batch = Batch.for_scores(histories, network.max_length)
        maps = network.eval().attention_maps(batch)[0].mean(1)  # (users, L, L)
        for axis, weights in zip(row, maps.numpy(), strict=True):
            axis.imshow(weights, cmap="magma", vmin=0, vmax=0.5)
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(f"{NAMES[model]}\nε = {epsilon:g}")
    for axis, user in zip(axes[0], users, strict=True):
        axis.set_title(f"user {user}", fontsize=9)
    figure.suptitle(f"{TITLES[data]}: attention in block 1, row looks at column (black 0, white 0.5)", fontsize=10)
    return save(figure, path)


def print_attention_by_popularity(data: str, users: int = 500) -> None:
    """Attention of the last position in block 1 on items by popularity; 1 is what looking evenly at all would give."""
    dataset = prepare(data_file(data), max_length=LENGTH)
    long = np.flatnonzero(dataset.train_lengths == LENGTH)
    histories = dataset.histories(np.random.default_rng(0).choice(long, min(users, len(long)), replace=False))
    share = np.argsort(np.argsort(dataset.item_counts())) / dataset.num_items  # of items that are rarer
    place = share[np.stack(histories)]
    for (model, epsilon), network in models(data).items():
        batch = Batch.for_scores(histories, network.max_length)
        drawn = network.eval().attention_maps(batch)[0].mean(1)[:, -1].numpy() * LENGTH
        for low, high in ((0, 0.5), (0.5, 0.75), (0.75, 0.9), (0.9, 1)):
            inside = drawn[(place >= low) & (place < high)]
            told = f"mean {inside.mean():.2f}, below 0.05: {(inside < 0.05).mean():.1%} of {len(inside)}"
            print(f"{NAMES[model]}, ε = {epsilon:g}, items from {low:.0%} to {high:.0%}: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="ml-1m", choices=("ml-1m", "games"))
    data = parser.parse_args().data
    path = draw(data, ROOT / "docs" / "results" / f"attention-{data}.svg")
    print_attention_by_popularity(data)
    print(path or f"no finished run of {data} under {WORK}: python -m experiments.fill {data}")


if __name__ == "__main__":
    main()
