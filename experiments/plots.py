"""Figures in SVG, from the store alone; what is not in the store is left out, and a figure of nothing is not drawn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from experiments.cells import (
    EPSILONS,
    GRIDS,
    HEAT_EPSILON,
    HEAT_MAPS,
    TITLES,
    Cell,
    ceiling,
    correlated,
    counts,
    floor,
    heat_map,
    language,
    longer,
    paper,
    warm,
)
from experiments.literal import long_run
from experiments.paper_numbers import PAPER
from experiments.store import load
from experiments.tables import Result, last, results, signal
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpformer.accounting import calibrate

COLOURS = {"vanilla": "#b5452c", "literal": "#2b6777"}
NAMES = {"vanilla": "vanilla", "literal": "Re-Attention"}
HEAT_TITLES = {
    "unshared": "not shared",
    "vanilla": "shared",
    "reattention": "shared, Re-Attention",
    "literal": "shared, Re-Attention as printed",
}
METRICS = {"ndcg@10": "NDCG@10, %", "hit@10": "HIT@10, %"}
matplotlib.rcParams |= {"svg.hashsalt": "dpformer", "svg.fonttype": "none"}  # the same bytes for the same numbers


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def band(axis: Axes, found: list[Result], value: Callable[[dict[str, Any]], float], **style: Any) -> bool:
    """Mean over seeds, and between the lowest and the highest of them."""
    curves = [[(point["epoch"], value(point)) for point in result["curve"]] for result in found]
    if not curves:
        return False
    shortest = min(map(len, curves))
    x = [epoch for epoch, _ in curves[0][:shortest]]
    y = np.array([[number for _, number in curve[:shortest]] for curve in curves])
    axis.plot(x, y.mean(0), **style)
    if len(curves) > 1:
        axis.fill_between(x, y.min(0), y.max(0), color=style["color"], alpha=0.2, linewidth=0)
    return True


def convergence(data: str, path: Path) -> Path | None:
    """NDCG and HIT by epoch, vanilla and Re-Attention as printed, ε = 5 and 10, with the spread over seeds."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex=True)
    drawn = False
    for column, epsilon in enumerate((5, 10)):
        for row, (metric, label) in enumerate(METRICS.items()):
            axis = axes[row, column]
            for model, colour in COLOURS.items():
                found = results(lambda seed, m=model, e=epsilon: long_run(data, m, e, seed))
                name = f"{NAMES[model]}, {len(found)} seed{'s' if len(found) > 1 else ''}"
                drawn |= band(
                    axis, found, lambda p, k=metric: 100 * p["masked"][k], color=colour, marker=".", label=name
                )
                if data in PAPER:
                    level = PAPER[data][model][epsilon][row]
                    axis.axhline(level, color=colour, linestyle=":", linewidth=1, label=f"{NAMES[model]}, paper's best")
            found = results(lambda seed, e=epsilon: warm(data, e, seed))
            drawn |= band(
                axis,
                found,
                lambda p, k=metric: 100 * p["masked"][k],
                color="#7a5c99",
                marker=".",
                label="started from counts",
            )
            _level(axis, results(lambda seed, e=epsilon: counts(data, e, seed)), metric, "0.25", "transition counts")
            _level(axis, results(lambda _: floor(data))[:1], metric, "0.6", "popularity")
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
        axes[0, column].set_title(f"{TITLES[data]}, ε = {epsilon}")
        axes[1, column].set_xlabel("epoch")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return save(figure, path) if drawn else _nothing(figure)


def _level(axis: Axes, found: list[Result], metric: str, colour: str, name: str) -> None:
    if found:
        level = np.mean([100 * last(result)[metric] for result in found])
        axis.axhline(level, color=colour, linestyle="--", linewidth=1, label=name)


def signals(path: Path) -> Path | None:
    """MovieLens: accuracy by what all steps together know of the mean gradient, ours and the paper's."""
    figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    every = [made("ml-1m", model, e, 0) for made in (paper, long_run) for model in COLOURS for e in EPSILONS] + longer()
    every += [cell for cell in correlated() if cell.data == "ml-1m" and "bands" in cell.choices]
    drawn = False
    for cell in {cell.name: cell for cell in every}.values():
        model = cell.label.split("-")[0]
        for result in results(cell.with_seed) if model in COLOURS else ():
            mark = "s" if "bands" in cell.choices else "o"
            axis.plot(signal(result), 100 * last(result)["ndcg@10"], mark, color=COLOURS[model])
            drawn = True
    for epsilon in EPSILONS:  # the largest batch of its grid, 100 epochs
        users, batch, steps = 6040, 4096, 148
        sigma = calibrate(epsilon=epsilon, delta=1 / users, sample_rate=batch / users, steps=steps)
        for model, colour in COLOURS.items():
            level = PAPER["ml-1m"][model][epsilon][0]
            axis.plot(batch / users * steps**0.5 / sigma, level, "o", color=colour, fillstyle="none")
    for model, colour in COLOURS.items():
        axis.plot([], [], "o", color=colour, label=f"{NAMES[model]}, last iterate")
        axis.plot([], [], "o", color=colour, fillstyle="none", label=f"{NAMES[model]}, paper's best (ε = 5, 8, 10)")
    axis.plot([], [], "s", color=COLOURS["vanilla"], label=f"{NAMES['vanilla']}, correlated noise")
    axis.set(xlabel="q√T/σ", ylabel="NDCG@10, %", ylim=(0, 9), title="MovieLens-1M")
    axis.legend(frameon=False, fontsize=8)
    return save(figure, path) if drawn else _nothing(figure)


def heat(data: str, path: Path) -> Path | None:
    """Batch × learning rate, one panel a model."""
    maps = HEAT_MAPS[data]
    grids = [_grid(heat_map(data, model, **change)) for model, change in maps]
    known = np.concatenate([grid.ravel() for grid in grids])
    known = known[~np.isnan(known)]
    if not len(known):
        return None
    figure, axes = plt.subplots(1, len(maps), figsize=(3.4 * len(maps), 3.2), layout="constrained", squeeze=False)
    for axis, grid, (model, change) in zip(axes[0], grids, maps, strict=True):
        axis.imshow(grid, cmap="viridis", vmin=known.min(), vmax=known.max(), origin="lower", aspect="auto")
        for (y, x), value in np.ndenumerate(grid):
            dark = value < known.min() + 0.6 * np.ptp(known)
            axis.text(
                x, y, "–" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", color="w" if dark else "k"
            )
        axis.set_xticks(range(grid.shape[1]), [f"{rate:g}" for rate in GRIDS[data]["learning_rate"]])
        axis.set_yticks(range(grid.shape[0]), [str(batch) for batch in GRIDS[data]["batch_size"]])
        title = HEAT_TITLES[model]
        axis.set(title=title + (f", d = {change['dim']}" if change else ""), xlabel="learning rate")
    axes[0, 0].set_ylabel("batch")
    figure.suptitle(f"{TITLES[data]}, ε = {HEAT_EPSILON[data]}, {GRIDS[data]['epochs']} epochs: NDCG@10, %")
    return save(figure, path)


def _grid(cells: list[Cell]) -> np.ndarray:
    found = [load(cell.name) for cell in cells]
    values = [np.nan if result is None else 100 * last(result)["ndcg@10"] for result in found]
    return np.array(values).reshape(len(GRIDS[cells[0].data]["batch_size"]), -1)


def long_tail(path: Path) -> Path | None:
    """How many users have each item, both data sets."""
    figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    drawn = False
    for data, colour in (("ml-1m", COLOURS["vanilla"]), ("games", COLOURS["literal"])):
        result = load(floor(data).name)
        if result is not None:
            rank, users = np.array(result["tail"]).T
            axis.loglog(rank, users / result["users"], color=colour, label=f"{TITLES[data]}: {result['items']:,} items")
            drawn = True
    axis.set(xlabel="item, from the most popular", ylabel="share of users who have it")
    axis.legend(frameon=False)
    return save(figure, path) if drawn else _nothing(figure)


def shakespeare(path: Path) -> Path | None:
    """Held-out loss on TinyShakespeare over epochs."""
    figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    drawn = False
    for epsilon, width in ((5, 1.0), (8, 1.6), (10, 2.4)):
        for model, colour in COLOURS.items():
            found = results(lambda seed, m=model, e=epsilon: language(m, e, seed))
            label, style = f"ε = {epsilon}, {NAMES[model]}", "-" if model == "vanilla" else "--"
            drawn |= band(
                axis, found, lambda p: p["text"]["loss"], color=colour, linewidth=width, linestyle=style, label=label
            )
    found = results(lambda seed: ceiling("tinyshakespeare", seed))
    drawn |= band(axis, found, lambda p: p["text"]["loss"], color="0.4", linestyle=":", label="not private")
    if not drawn:
        return _nothing(figure)
    axis.set(xlabel="epoch", ylabel="held-out loss, nats per character")
    axis.legend(frameon=False, fontsize=8)
    return save(figure, path)


def _nothing(figure: Figure) -> None:
    plt.close(figure)
