"""Several runs side by side: budgets, accuracy with intervals, differences on the same held-out items, settings.

Accuracy on held-out items is exact, so it is not covered by the guarantee; nor is a choice based on it. The total cost
of all runs is stated for anyone who shows more than one of them, or chooses one by looking at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.events import Event
from dpformer.accounting.searches import Search, epsilon_with_searches
from dpformer.errors import DpformerError
from dpformer.evaluation.metrics import DEPTH, bootstrap, shown
from dpformer.report.accuracy import measure
from dpformer.runs.config import Config
from dpformer.runs.run import finished
from dpformer.runs.tasks.recommend import RankingAccuracy

if TYPE_CHECKING:
    from dpformer.evaluation import Evaluation
    from dpformer.runs.run import Run
    from dpformer.runs.tasks import Measured

NOTE = (
    "Accuracy here is exact and not covered by ε, nor is a choice between runs based on it: keep it as private as the "
    "data, or compare noisy metrics (--private-metrics)."
)
NEVER_COMPARED = ("deployment", "cache", "checkpoint_seconds")


@dataclass(frozen=True)
class Side:
    """One of the runs, with its accuracy or the reason why there is none."""

    name: str
    run: Run
    measured: Measured | None = None
    no_accuracy: str = ""

    @property
    def accuracy(self) -> dict[str, dict[str, float]] | None:
        """metric → {value, and low, high of a 95% interval if it is a mean over users}, as served."""
        if self.measured is None:
            return None
        found = self.measured.to_dict()["metrics"]
        if self.measured.kind == "language":
            return {name: {"value": found[name]} for name in ("loss", "bits_per_character", "perplexity")}
        of_model: Mapping[str, dict[str, dict[str, float]]] = found["model"]
        return next(iter(of_model.values()))  # the headline policy comes first

    def to_dict(self) -> dict[str, Any]:
        facts = self.run.statement
        names = ("headline", "private", "epsilon", "delta", "unit", "users", "model", "attack", "metrics", "budget")
        return {
            "name": self.name,
            "folder": str(self.run.folder),
            **{name: facts[name] for name in names if name in facts},
            "spent_on": {event["label"] or event["kind"]: event["epsilon_alone"] for event in facts["events"]},
            "accuracy": self.accuracy,
            **({"no_accuracy": self.no_accuracy} if self.no_accuracy else {}),
        }


@dataclass(frozen=True)
class Comparison:
    """Everything the page says about some runs."""

    sides: tuple[Side, ...]
    public: bool
    filter_seen: bool = True

    @property
    def together(self) -> dict[str, float] | None:
        """Total ε at the sum of the runs' δ, if they share users; None if one is not private."""
        statements = [side.run.statement for side in self.sides]
        if not all(facts["private"] for facts in statements):
            return None
        delta = min(sum(facts["delta"] for facts in statements), 0.5)
        epsilon = _spent(statements, delta)
        return {"epsilon": epsilon, "delta": delta} if math.isfinite(epsilon) else None

    @property
    def settings(self) -> dict[str, list[Any]]:
        """Options that differ, by name: one value per run; only the file name of a path."""
        table: dict[str, list[Any]] = {}
        for name in Config.model_fields:
            if name in NEVER_COMPARED:
                continue
            values = [_chosen(side.run.config, name) for side in self.sides]
            if any(value != values[0] for value in values):
                table[name] = values
        return table

    @property
    def same_test(self) -> bool | None:
        """Whether all were evaluated on the same held-out items of the same users; None if unknown."""
        measured = [side.measured for side in self.sides]
        if not all(isinstance(one, RankingAccuracy) for one in measured):
            return None
        first, *others = (_tested(one) for one in measured if isinstance(one, RankingAccuracy))
        return all(first == other for other in others)

    @property
    def differences(self) -> list[dict[str, dict[str, float]]]:
        """For each run but the first, its metrics minus the first run's, paired by user, with 95% intervals."""
        if not self.same_test:
            return []
        ranked = [side.measured for side in self.sides if isinstance(side.measured, RankingAccuracy)]
        return [_difference(ranked[0].model, one.model) for one in ranked[1:]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "runs": [side.to_dict() for side in self.sides],
            "together": self.together,
            "accuracy_of": None if self.public else "served" if self.filter_seen else "unmasked",
            "same_test": self.same_test,
            "differences_from_the_first": self.differences,
            "settings": self.settings,
            **({} if self.public else {"covered": False, "note": NOTE}),
        }


def compare(folders: Sequence[str | Path], *, public: bool = False, filter_seen: bool = True) -> Comparison:
    """Open and evaluate runs.

    Args:
        folders: two or more finished runs of one task.
        public: omit exact accuracy, so that the result may be published; no data is read.
        filter_seen: evaluate `recommend`, or (False) `recommend --allow-seen`.
    """
    paths = [Path(folder) for folder in folders]
    if len({path.resolve() for path in paths}) < max(2, len(paths)):
        raise DpformerError(f"{len(paths)} runs were given; give two or more, each once")
    runs = [finished(path) for path in paths]
    if len(tasks := {run.config.task for run in runs}) > 1:
        raise DpformerError(f"the runs are of different tasks, {' and '.join(sorted(tasks))}: compare runs of one task")
    if not filter_seen and "lm" in tasks:
        raise DpformerError("--allow-seen applies to recommendations, but these are language models: omit it")
    sides = [Side(name, run) for name, run in zip(_names(paths), runs, strict=True)]
    return Comparison(tuple(side if public else _measured(side, filter_seen) for side in sides), public, filter_seen)


def _measured(side: Side, filter_seen: bool) -> Side:
    try:
        return Side(side.name, side.run, measure(side.run, filter_seen=filter_seen))
    except DpformerError as error:  # its data may have moved; the rest can still be compared
        return Side(side.name, side.run, None, str(error))


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest distinct suffixes of the paths."""
    parts = [path.resolve().parts for path in paths]
    length = next(n for n in range(1, max(map(len, parts)) + 1) if len({part[-n:] for part in parts}) == len(parts))
    return ["/".join(part[-length:]) for part in parts]


def _chosen(config: Config, name: str) -> Any:
    if name in config.kind.silent:
        return None
    value = getattr(config, name)
    return value.name if isinstance(value, Path) else value


def _spent(statements: Sequence[Mapping[str, Any]], delta: float) -> float:
    events: list[Event] = []
    searches: list[Search] = []
    try:
        for facts in statements:
            if "tuning" in facts:
                tuning = facts["tuning"]
                searches.append(Search(tuple(map(Event.from_dict, tuning["events"])), float(tuning["mean_runs"])))
            else:
                events += [Event.from_dict(_without_cost(event)) for event in facts["events"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DpformerError(f"a statement has events that cannot be composed: {error}") from None
    return epsilon_with_searches(events, searches, delta) if searches else epsilon_of(events, delta)


def _without_cost(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "epsilon_alone"}


def _tested(measured: RankingAccuracy) -> tuple[list[str], list[str]]:
    """Users and their held-out items, by their ids in the data."""
    of, dataset = measured.model, measured.dataset
    users = [str(dataset.user_ids[user]) for user in of.users.tolist()]
    return users, [dataset.vocabulary.ids[item] for item in of.targets.tolist()]


def _difference(first: Evaluation, other: Evaluation) -> dict[str, dict[str, float]]:
    both = torch.stack([other.ranks, first.ranks], dim=-1)  # (U, 2)
    found = {}
    for metric in shown():

        def less(ranks: torch.Tensor, metric: Any = metric) -> torch.Tensor:
            return torch.as_tensor(metric(ranks[..., 0], DEPTH) - metric(ranks[..., 1], DEPTH))

        low, high = bootstrap(less, both)
        value = float(np.mean(less(both[:, None]).numpy()))
        found[metric.label()] = {"value": value, "low": low, "high": high}
    return found
