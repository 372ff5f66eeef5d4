"""Tables in Markdown, from the store alone: what is there is shown with its spread, what is not is a dash."""

import json
import statistics
from collections.abc import Callable
from typing import Any

from experiments.cells import (
    EPSILONS,
    SETTINGS,
    TITLES,
    Cell,
    ablations,
    ceiling,
    cheap,
    correlated,
    counts,
    decisive,
    floor,
    language,
    longer,
    longest,
    other_settings,
    paper,
    scaled,
    warm,
    warm_in_bands,
)
from experiments.literal import long_run
from experiments.paper_numbers import ACTIVATIONS, NANOGPT, PAPER
from experiments.store import ROOT, load

from dpformer.cli.moments import DEVIATIONS, variances
from dpformer.noise.mechanisms import noise_of

ALL_SEEDS = range(5)
ROWS = {
    "gru": "GRU",
    "lstm": "LSTM",
    "unshared": "Transformer, not shared",
    "vanilla": "Transformer, vanilla",
    "reattention": "with Re-Attention, rows renormalised",
    "literal": "**with Re-Attention, as printed**",
}
KINDS = {"vanilla": "plain", "reattention": "renormalised", "literal": "literal"}
WARM = "**vanilla, started from transition counts**"
Result = dict[str, Any]


def results(cell: Callable[[int], Cell]) -> list[Result]:
    """What is in the store of a cell, all seeds."""
    found = (load(cell(seed).name) for seed in ALL_SEEDS)
    return [result for result in found if result is not None]


def last(result: Result, policy: str = "masked") -> dict[str, float]:
    """The released iterate, fixed before the run."""
    return dict(result["curve"][-1][policy])


OLD = "†"  # behind the build of a result that does not say of which src/ it is


def build_of(result: Result) -> str:
    return str(result["build"]) if "build" in result else str(result["revision"]).removesuffix("-dirty") + OLD


def best(result: Result, policy: str = "masked") -> dict[str, float]:
    """The best epoch, each metric's own: the paper's way, which chooses on test items."""
    return {name: max(point[policy][name] for point in result["curve"]) for name in ("ndcg@10", "hit@10")}


def spread(values: list[float], digits: int = 2) -> str:
    """Mean, and deviation over seeds."""
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def pair(points: list[dict[str, float]]) -> str:
    """NDCG@10 / HIT@10 in %."""
    if not points:
        return "–"
    return " / ".join(spread([100 * point[name] for point in points]) for name in ("ndcg@10", "hit@10"))


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def pairs() -> str:
    """Vanilla beside Re-Attention by epoch, MovieLens at ε = 5, by seed; the mean gain; other scales."""
    rows, gains = [], []
    for seed in ALL_SEEDS:
        both = [load(cell.name) for cell in decisive(seed)]
        for model, result in zip(("vanilla", "Re-Attention"), both, strict=True):
            if result is not None:
                rows.append([model, str(seed), *map(_percents, result["curve"])])
        if both[0] is not None and both[1] is not None:
            gains.append([100 * (b["masked"]["ndcg@10"] - a["masked"]["ndcg@10"]) for a, b in _together(*both)])
    if not rows:
        return "*No pair is in the store yet.*"
    epochs = [f"{point['epoch']:.0f}" for point in next(filter(None, map(load, _names())))["curve"]]
    if gains:
        rows.append(
            ["gain in NDCG@10", f"{len(gains)}", *(spread(list(column)) for column in zip(*gains, strict=True))]
        )
    for cell in scaled():
        if (result := load(cell.name)) is not None:
            title = f"Re-Attention, scale {cell.choices['reattention_scale']:g}"
            rows.append([title, str(cell.seed), *map(_percents, result["curve"])])
    return markdown(["NDCG@10 / HIT@10, %", "seed", *(f"epoch {epoch}" for epoch in epochs)], rows)


def at_length() -> str:
    """What attention trained models pay to items by popularity, and what another kind at inference does."""
    file = ROOT / "docs" / "results" / "at-length.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    rows = []
    for model in ("vanilla", "reattention", "literal"):
        for seed in ALL_SEEDS:
            looked = found.get(long_run("ml-1m", model, 5, seed).name, {"accuracy": {}})
            for kind, accuracy in looked["accuracy"].items():
                blocks = (" ".join(f"{x:.2f}" for x in block) for block in looked["attention by popularity"][kind])
                sums = " ".join(f"{x:.2f}" for x in looked["row sums"][kind])
                rows.append([KINDS[model], str(seed), kind, _percents({"masked": accuracy}), *blocks, sums])
    if not rows:
        return "*Not there yet: `DPFORMER_DATA=FOLDER python -m experiments.at_length`.*"
    head = ["trained with", "seed", "at inference", "NDCG@10 / HIT@10, %", "attention in block 1, rare … popular"]
    return markdown([*head, "block 2", "sum of a row, both blocks"], rows)


def _names() -> list[str]:
    return [cell.name for seed in ALL_SEEDS for cell in decisive(seed)]


def _together(vanilla: Result, other: Result) -> list[tuple[Result, Result]]:
    return list(zip(vanilla["curve"], other["curve"], strict=True))


def _percents(point: Result) -> str:
    masked = point["masked"]
    return f"{100 * masked['ndcg@10']:.2f} / {100 * masked['hit@10']:.2f}"


def settings() -> str:
    """One setting a data set, for all its rows."""
    names = ("batch_size", "epochs", "max_length", "dropout", "learning_rate")
    lines = [[TITLES[data], *(f"{value[name]:g}" for name in names)] for data, value in SETTINGS.items()]
    return markdown(["", "batch", "epochs", "length", "dropout", "learning rate"], lines)


def accuracy(data: str, epsilon: float) -> str:
    """One ε of the paper's main table, with the floor, the ceiling and the counts."""
    lengths = longest(data, epsilon, lambda cell: load(cell.name) is not None)
    found = {
        title: results(lambda seed, m=model: paper(data, m, epsilon, seed, **lengths[m]))
        for model, title in ROWS.items()
    } | {
        WARM: results(lambda seed: warm(data, epsilon, seed)),
        "**transition counts**": results(lambda seed: counts(data, epsilon, seed)),
        "popularity, not private": results(lambda _: floor(data))[:1],
        f"{ROWS['vanilla']}, not private": results(lambda seed: ceiling(data, seed)),
    }
    printed = {ROWS[model]: "{:.2f} / {:.2f}".format(*PAPER[data][model][epsilon]) for model in PAPER[data]}
    rows = [
        [title, printed.get(title, ""), _epochs(runs), *_ours(runs), _builds(runs)] for title, runs in found.items()
    ]
    head = ["NDCG@10 / HIT@10, %", "paper, best epoch", "epochs of ours", "last iterate", "best epoch"]
    return markdown([*head, "last, unmasked", "seeds", "build"], rows)


def _builds(runs: list[Result]) -> str:
    return ", ".join(sorted({build_of(result) for result in runs}))


def _epochs(runs: list[Result]) -> str:
    return f"{runs[0]['config']['epochs']:g}" if runs and "epochs" in runs[0].get("config", {}) else ""


def _ours(found: list[Result]) -> list[str]:
    columns = [last, best, lambda result: last(result, "unmasked")]
    return [pair([column(result) for result in found]) for column in columns] + [str(len(found))]


def counted(names: tuple[str, ...], epsilons: tuple[float, ...]) -> str:
    """Transition counts and the popularity that is released with them."""
    rows = []
    for data in names:
        for epsilon in epsilons:
            found = results(lambda seed, d=data, e=epsilon: counts(d, e, seed))
            for model, points in (
                ("popularity", [result["popularity"] for result in found]),
                ("counts", [result["curve"][-1] for result in found]),
            ):
                both = [pair([point[policy] for point in points]) for policy in ("masked", "unmasked")]
                rows.append([TITLES[data], f"{epsilon:g}", model, *both, str(len(found))])
    return markdown(["data", "ε", "model", "NDCG@10 / HIT@10, %", "the same, unmasked", "seeds"], rows)


def changes() -> str:
    """MovieLens at ε = 5, one change at a time."""
    same = [paper("ml-1m", model, 5) for model in ("vanilla", "reattention")]
    return _changed(sorted([*same, *ablations()], key=lambda cell: list(ROWS).index(_model(cell))))


def cheaply() -> str:
    """Synthetic data, one change at a time."""
    return _changed(cheap())


def _changed(rows: list[Cell]) -> str:
    """One change at a time: the name of a cell tells it after model and ε."""
    head = ["NDCG@10 / HIT@10, %", "change", "last iterate", "best epoch", "last, unmasked", "seeds"]
    lines = []
    for cell in rows:
        usual = f"learning_rate={SETTINGS[cell.data]['learning_rate']:g}"
        change = ", ".join(f"`{part}`" for part in cell.label.split("-")[2:] if part != usual)
        lines.append([ROWS[_model(cell)], change or "–", *_ours(results(cell.with_seed))])
    return markdown(head, lines)


def _model(cell: Cell) -> str:
    return cell.label.split("-")[0]


def compared() -> str:
    """ε = 10 with other batches, epochs, lengths and learning rates, beside the setting of the tables."""
    same = [paper(data, model, 10) for data in ("ml-1m", "games") for model in ("vanilla", "reattention")]
    rows = []
    for cell in sorted([*same, *longer(), *other_settings()], key=lambda cell: (TITLES[cell.data], _model(cell))):
        found = results(cell.with_seed)
        chosen = [f"{cell.choices[name]:g}" for name in ("batch_size", "epochs", "max_length", "learning_rate")]
        rows.append(
            [TITLES[cell.data], ROWS[_model(cell)], *chosen, f"{signal(found[0]):.2f}" if found else "–", *_ours(found)]
        )
    head = ["data", "NDCG@10 / HIT@10, %", "batch", "epochs", "length", "learning rate", "q√T/σ"]
    return markdown([*head, "last iterate", "best epoch", "last, unmasked", "seeds"], rows)


def signal(result: Result) -> float:
    """q√T/σ: how well all steps together know the mean of users' gradients, whose noise is 1/(N·signal).

    √T is what is left of the noise in the sum of T steps, or less if it is correlated.
    """
    steps, left = result["steps"], noise_of(result["config"]).sum_deviation(result["steps"])
    return float(result["sample_rate"] * steps / left / result["noise_multiplier"])


def in_bands() -> str:
    """Noise that is correlated over some steps, beside noise that is independent."""
    same = [paper(data, "vanilla", epsilon) for data in ("ml-1m", "games") for epsilon in (5, 10)]
    rows = []
    every = [*same, *correlated(), *(warm(data, 10) for data in ("ml-1m", "games")), *warm_in_bands()]
    for cell in sorted(
        every, key=lambda cell: (TITLES[cell.data], cell.choices["epsilon"], "warm_start" in cell.choices)
    ):
        found = results(cell.with_seed)
        start = "counts" if "warm_start" in cell.choices else "nothing"
        chosen = [start, f"{cell.choices.get('bands', 1)}", f"{cell.choices['learning_rate']:g}"]
        noise = [f"{found[0]['noise_multiplier']:.3g}", f"{signal(found[0]):.2f}"] if found else ["–", "–"]
        rows.append([TITLES[cell.data], f"{cell.choices['epsilon']:g}", *chosen, *noise, *_ours(found)])
    head = [
        "data",
        "ε",
        "from",
        "bands",
        "learning rate",
        "σ",
        "signal",
        "NDCG@10 / HIT@10, %, last iterate",
        "best epoch",
    ]
    return markdown([*head, "last, unmasked", "seeds"], rows)


def warmed() -> str:
    """Networks that start from counts, beside those that start from nothing and counts alone. Last iterates."""
    rows = []
    for data in ("ml-1m", "games"):
        for epsilon in EPSILONS:
            columns = [
                results(lambda seed, d=data, e=epsilon: paper(d, "vanilla", e, seed)),
                results(lambda seed, d=data, e=epsilon: warm(d, e, seed)),
                results(lambda seed, d=data, e=epsilon: counts(d, e, seed)),
            ]
            nothing, started, alone = (pair([last(result) for result in found]) for found in columns)
            printed = "{:.2f} / {:.2f}".format(*PAPER[data]["literal"][epsilon])
            rows.append([TITLES[data], f"{epsilon:g}", nothing, started, alone, printed])
    head = ["data", "ε", "from nothing", "started from counts", "counts alone", "the paper's best (Re-Attention)"]
    return markdown(head, rows)


def joined(runs: list[Result]) -> str:
    """Counts and a Transformer under one budget, from join.json."""
    rows = []
    for run in runs:
        found = dict(run.get("joined", {}))
        alone = found.pop("transformer", None)
        shown = [found.get(name) for name in ("0.1", "1", "mixture 0.1")]
        best = max(found, key=lambda name: found[name][0]) if found else None
        rows.append(
            [run["data"], f"{run['epsilon']:g}", run["how"], f"{run['share']:g}", _numbers(run["counts"])]
            + [_numbers(value) for value in (alone, *shown)]
            + [f"{_numbers(found[best])} ({best})" if best else "–"]
        )
    head = ["data", "ε", "how", "share of counts", "counts alone with that share", "Transformer alone"]
    return markdown([*head, "λ = 0.1", "λ = 1", "mixture, λ = 0.1", "best λ, seen afterwards"], rows)


def _numbers(pair: list[float] | None) -> str:
    return "–" if pair is None else f"{pair[0]:.2f} / {pair[1]:.2f}"


def texts(epsilons: tuple[float, ...]) -> str:
    """TinyShakespeare: held-out loss."""
    rows = []
    for epsilon in epsilons:
        for model in ("vanilla", "reattention", "literal"):
            rows.append(_text(ROWS[model], f"{epsilon:g}", lambda seed, m=model, e=epsilon: language(m, e, seed)))
    rows.append(_text(ROWS["vanilla"], "∞", lambda seed: ceiling("tinyshakespeare", seed)))
    rows += [[f"nanoGPT, {size} (published)", "∞", f"{loss:.2f}", "", ""] for size, loss in NANOGPT.items()]
    return markdown(["model", "ε", "held-out loss, nats per character", "bits per character", "seeds"], rows)


def _text(title: str, epsilon: str, cell: Callable[[int], Cell]) -> list[str]:
    found = [result["curve"][-1]["text"] for result in results(cell)]
    loss, bits = (spread([text[name] for text in found], 3) for name in ("loss", "bits_per_character"))
    return [title, epsilon, loss, bits, str(len(found))]


def activations() -> str:
    """The paper's table of variances, and ours: computed here, in seconds."""
    rows = []
    for printed, deviation in zip(ACTIVATIONS, DEVIATIONS, strict=True):
        found = variances(deviation, 1_000_000)
        ours = [f"{found[name]:.3g}" for name in ("relu_sampled", "relu_exact", "gelu_sampled", "gelu_exact")]
        rows.append([printed[0], *printed[1:], *ours])
    head = ["input", "paper: ReLU, sampled", "GELU, sampled", "analytic"]
    return markdown([*head, "ours: ReLU, sampled", "ReLU, exact", "GELU, sampled", "GELU, exact"], rows)
