"""The content of a report, gathered from the run folder; each part knows whether the guarantee covers it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from markupsafe import Markup

from dpformer.accounting.units import UnitOfPrivacy, unit_of
from dpformer.data import read_catalog
from dpformer.errors import DpformerError
from dpformer.evaluation.evaluate import POLICIES
from dpformer.evaluation.metrics import bootstrap, headline, hit
from dpformer.files import MOST_METRICS, read_text
from dpformer.kinds.popularity import BASELINE
from dpformer.kinds.registry import kind_of
from dpformer.report.accuracy import measure
from dpformer.report.svg import Group, Line, dot_chart, heat_map, line_chart
from dpformer.runs.tasks import task_of
from dpformer.runs.tasks.recommend import MODEL, vocabulary_of

if TYPE_CHECKING:
    from dpformer.runs.model_file import Release
    from dpformer.runs.run import Run

GROUPS = ("1st quarter", "2nd", "3rd", "4th", "below the noise")
EXAMPLE_LENGTH = 8
SHOWN_POLICIES = {"served": ("seen items excluded", "c1"), "unmasked": ("all items ranked", "c2")}


@dataclass(frozen=True)
class Figure:
    """A chart with its legend: names of series and their colours."""

    title: str
    chart: Markup
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Example:
    """A synthetic history, its attention maps, and the model's recommendations."""

    name: str
    items: list[str]
    maps: list[Figure]
    next: list[str]


@dataclass(frozen=True)
class Content:
    """All parts of the page; None is omitted."""

    run: Run
    public: bool
    training: list[Figure] = field(default_factory=list)
    tail: Figure | None = None
    accuracy: dict[str, Any] | None = None
    language: dict[str, Any] | None = None  # instead of accuracy, for a language model
    no_accuracy: str = ""
    by_popularity: Figure | None = None
    examples: list[Example] = field(default_factory=list)
    given: bool = False  # the examples were given by the page's author


def gather(
    run: Run,
    *,
    histories: Sequence[Sequence[Any]] | None = None,
    public: bool = False,
    data: str | Path | None = None,
    catalog: str | Path | None = None,
) -> Content:
    """Read, evaluate and draw. With `public`, only what the guarantee covers, without reading the data."""
    release, words = run.release, words_of(run)
    if catalog is not None:
        release = release.titled(read_catalog(catalog))
    chosen = _made_up(release) if histories is None else [("Given", release.index(history)) for history in histories]
    content = Content(
        run,
        public,
        tail=_tail(release, run.statement, words),
        examples=[_example(release, name, history) for name, history in chosen],
        given=histories is not None,
    )
    if public:
        return content
    content = replace(content, training=_training(_metrics(run.folder / "metrics.jsonl"), run.statement, words))
    try:
        measured = measure(run, data)
    except DpformerError as error:  # the page is about the model; its data may have moved
        return replace(content, no_accuracy=str(error))
    if measured.kind == "language":
        return replace(content, language=measured.to_dict()["metrics"])
    return replace(content, accuracy=measured.to_dict(), by_popularity=_by_popularity(measured, release))


@dataclass(frozen=True)
class Words:
    """Names of one sample and of its elements."""

    unit: UnitOfPrivacy
    thing: str
    things: str


def words_of(run: Run) -> Words:
    task = task_of(run.config)
    return Words(unit_of(run.statement["unit"]), task.thing, task.things)


# Training: exact statistics of the data, not covered by ε.


def _metrics(path: Path) -> list[dict[str, Any]]:
    try:
        if not path.is_file():  # reading a named pipe would block
            raise OSError("it is not a file")
        lines = read_text(path, MOST_METRICS).split("\n")
        records = [json.loads(line) for line in lines if line.strip()]
        if not all(map(_is_record, records)):
            raise ValueError("a line is not the record of a step")
    except (OSError, ValueError, RecursionError) as error:
        raise DpformerError(f"{path} cannot be read: {error}") from None
    return records


def _is_record(record: Any) -> bool:
    """Whether a line has the numbers that curves need; the file may be untrusted."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    measured = [record[name] for name in (*POLICIES, "text") if name in record]
    if measured and not isinstance(record.get("split"), str):
        return False
    if not all(isinstance(values, dict) for values in measured):
        return False
    numbers = [record.get(name) for name in ("loss", "median_norm", "epsilon")]
    numbers += [value for values in measured for value in values.values()]
    return all(value is None or (type(value) in (int, float) and math.isfinite(value)) for value in numbers)


def _training(records: list[dict[str, Any]], statement: dict[str, Any], words: Words) -> list[Figure]:
    steps = [record for record in records if "split" not in record]
    figures = []
    x, loss = _column(steps, "loss")
    if x:
        legend = [("mean over the batch", "c1")]
        chart = line_chart(_with_trend(x, loss), x_label="step", y_label="loss")
        figures.append(
            Figure("Training loss", chart, legend, f"Cross-entropy per position, mean over {words.unit.plural}.")
        )
    x, norms = _column(steps, "median_norm")
    if x:
        bound = statement.get("clip_norm")
        rule = (bound, f"bound C = {bound:g}") if bound else None
        chart = line_chart(
            _with_trend(x, norms), x_label="step", y_label="median gradient norm", from_zero=True, rule=rule
        )
        note = f"The contribution of one {words.unit.name} before clipping; at most C enters the sum."
        figures.append(Figure("Gradient norms", chart, [("median over the batch", "c1")], note))
    x, spent = _column(steps, "epsilon")
    if x:
        chart = line_chart([Line(x, spent, "ε")], x_label="step", y_label="ε spent", from_zero=True)
        figures.append(
            Figure(
                "Budget spent",
                chart,
                [("ε, an upper bound", "c1")],
                "Public: it depends on the plan alone. A quick upper bound during training, exact at the end.",
            )
        )
    figures += _accuracy_curves(records)
    return figures


def _accuracy_curves(records: list[dict[str, Any]]) -> list[Figure]:
    """Evaluations during training; records of older versions may lack a metric, which is then omitted."""
    metric, figures = headline(), []
    ranked = [r for r in records if all(metric.label() in r.get(policy, {}) for policy in SHOWN_POLICIES)]
    if ranked:
        x = [r["step"] for r in ranked]
        lines = [
            Line(x, [r[policy][metric.label()] for r in ranked], policy, colour)
            for policy, (_, colour) in SHOWN_POLICIES.items()
        ]
        chart = line_chart(lines, x_label="step", y_label=metric.heading(), from_zero=True)
        title = f"{metric.heading()} on {ranked[0]['split']} items"
        figures.append(Figure(title, chart, list(SHOWN_POLICIES.values()), "No influence on training."))
    read = [r for r in records if "bits_per_character" in r.get("text", {})]
    if read:
        line = Line([r["step"] for r in read], [r["text"]["bits_per_character"] for r in read], "bits")
        chart = line_chart([line], x_label="step", y_label="bits per character")
        legend = [("bits per character", "c1")]
        figures.append(Figure("Held-out text", chart, legend, "No influence on training."))
    return figures


def _column(records: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    pairs = [(r["step"], r[name]) for r in records if isinstance(r.get(name), int | float)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _with_trend(x: list[float], y: list[float]) -> list[Line]:
    """The values, faint, and on top their running mean over a twentieth of the run."""
    width = max(1, len(y) // 20)
    if width < 3:
        return [Line(x, y, "value")]
    padded = np.pad(np.asarray(y), (width // 2, width - 1 - width // 2), mode="edge")
    trend = np.convolve(padded, np.full(width, 1 / width), mode="valid")
    return [Line(x, y, "value", faint=True), Line(x, trend.tolist(), "trend")]


# The long tail, from the released model alone.


def _tail(release: Release, statement: dict[str, Any], words: Words) -> Figure | None:
    if release.frequencies is None:
        return None
    p = np.sort(release.frequencies)[::-1]
    p = p[p > 0]
    if not len(p):
        return None
    ranks = np.arange(1, len(p) + 1)
    keep = np.unique(np.round(np.geomspace(1, len(p), min(len(p), 160))).astype(int)) - 1
    share = f"share of {words.unit.plural}"
    line = Line(ranks[keep].tolist(), p[keep].tolist(), share)
    chart = line_chart([line], x_label=f"{words.thing}, most frequent first", y_label=share, log=True)
    head = p[: max(1, len(p) // 10)].sum() / p.sum()
    note = f"The most frequent tenth of the {words.things} has {head:.0%} of the released total. "
    if lost := int((popularity_group(release.frequencies) == 4).sum()):
        note += f"{lost:,} {words.things} are below the noise and share one value. "
    if statement["epsilon"] is None:
        note += "Exact: this run is not private."
    else:
        note += "Drawn from noisy frequencies, never from raw counts."
    title = f"{share.capitalize()} that have each {words.thing}"
    return Figure(title, chart, [(f"released {share}", "c1")], note)


def popularity_group(frequencies: np.ndarray) -> np.ndarray:
    """0 … 3 for quarters of the items, most popular first, 4 for items that cannot be distinguished, (M,).

    The latter share the smallest frequency: noisy frequencies are floored where they are mostly noise.
    """
    noise = frequencies == frequencies.min()
    if noise.sum() == 1:
        noise[:] = False
    clear = frequencies[~noise]
    # Distinguishable items that are strictly more popular.
    more_popular = np.searchsorted(np.sort(-clear), -frequencies, side="left")
    return np.where(noise, 4, 4 * more_popular // max(1, len(clear)))


def _by_popularity(measured: Any, release: Release) -> Figure | None:
    if release.frequencies is None:
        return None
    numbers = vocabulary_of(release).match(list(measured.dataset.vocabulary.ids))[measured.model.targets]
    # Not in the released list: below the noise.
    group = np.where(numbers >= 0, popularity_group(release.frequencies)[numbers], 4)
    groups, shares = [], []
    for number, name in enumerate(GROUPS):
        chosen = torch.from_numpy(np.flatnonzero(group == number))
        if len(chosen):
            ranks = (measured.model.ranks[chosen], measured.baseline.ranks[chosen])
            label = name.removesuffix(" quarter").removeprefix("below the ")
            groups.append(Group(label, [(float(hit(r)), *bootstrap(hit, r)) for r in ranks]))
            shares.append(f"{len(chosen) / len(group):.0%} {name}")
    names = (MODEL, BASELINE.name)
    chart = dot_chart(groups, names, x_label="items by released frequency", y_label=hit.heading())
    note = (
        "Quarters of the items whose released frequencies can be distinguished, most popular first; the rest is below "
        f"the noise. Share of the held-out items: {', '.join(shares)}."
    )
    title = f"{hit.heading()} by popularity of the item"
    return Figure(title, chart, list(zip(names, ("c1", "c2"), strict=True)), note)


# Examples: never a real user's history.


def _made_up(release: Release) -> list[tuple[str, np.ndarray]]:
    """Popular and rare items alternating, and popular items, by the released frequencies; else the first items."""
    size = len(release.vocabulary)
    length = min(EXAMPLE_LENGTH, size - 1, getattr(release.model, "max_length", EXAMPLE_LENGTH))
    if release.frequencies is None or size < 2 * EXAMPLE_LENGTH:
        return [("The first items of the vocabulary", np.arange(length))]
    order = np.argsort(-release.frequencies, kind="stable")
    turns = np.stack([order[:length], order[::-1][:length]], axis=1).ravel()[:length]
    return [("Popular and rare items alternating", turns), ("Popular items", order[:length])]


def _example(release: Release, name: str, history: np.ndarray) -> Example:
    shown = history[-EXAMPLE_LENGTH:]
    # A language model may repeat a token, so a list of unseen ones would not be its answer.
    best = [] if "text" in release.metadata else release.recommend([shown], 5)[0]
    names = [str(entry.get("title") or entry["item_id"]) for entry in best]
    return Example(name, [release.title(int(item)) for item in shown], _maps(release.model, shown), names)


def _maps(model: Any, history: np.ndarray) -> list[Figure]:
    pictures = kind_of(model).pictures(model, history)
    return [Figure(picture.title, heat_map(picture.matrix, label=picture.label)) for picture in pictures]
