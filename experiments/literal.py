"""Re-Attention as printed in the paper, on the real data: the runs, the most informative first.

    literal and vanilla, MovieLens-1M at ε = 5, three seeds  →  what it is made of  →  ε = 10 and 8  →  Games
    →  more seeds  →  scales, 100 epochs  →  with what else helps  →  TinyShakespeare  →  heat maps
    →  the other rows, redone

A recipe is chosen by validation items alone: `Contest` names the candidates, and the runs on test items follow from
what they reached, once all of them are in the store.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from experiments.ablation import ABLATIONS
from experiments.cells import (
    EPSILONS,
    GROWN,
    LONG,
    MET,
    OTHERS,
    SEEDS,
    Cell,
    cells,
    counts,
    floor,
    heat_maps,
    language,
    paper,
)

PAIR = ("literal", "vanilla")
REAL = ("ml-1m", "games")
Load = Callable[[str], dict[str, Any] | None]


def length_of(data: str, epsilon: float) -> dict[str, Any]:
    """As long as the tables' vanilla: 60 epochs for MovieLens at ε = 5, 40 elsewhere."""
    return LONG if (data, epsilon) == ("ml-1m", 5) else GROWN[data]


def long_run(data: str, model: str, epsilon: float, seed: int, **changes: Any) -> Cell:
    """A row of the table."""
    return paper(data, model, epsilon, seed, **length_of(data, epsilon), **changes)


def ablated(name: str, seed: int) -> Cell:
    """MovieLens at ε = 5 with one part of Re-Attention changed."""
    row = ABLATIONS[name]
    cell = long_run("ml-1m", row, 5, seed)
    return replace(cell, label=cell.label.replace(row, name, 1), ablation=name)


def parts() -> list[Cell]:
    """What literal Re-Attention is made of, two seeds each; renormalised rows three, on the build of the others."""
    changed = [ablated(name, seed) for seed in (0, 1) for name in ABLATIONS]
    return [*changed, *(long_run("ml-1m", "reattention", 5, seed) for seed in (0, 1, 2))]


def more_seeds() -> list[Cell]:
    """Seeds are 0.2 apart, and so may gains be: five for the pair, as in the paper, and a third for each part."""
    pairs = [long_run("ml-1m", model, 5, seed) for seed in (3, 4) for model in PAIR]
    return pairs + [ablated(name, 2) for name in ABLATIONS]


def stretched() -> list[Cell]:
    """A weaker and a stronger correction, and 100 epochs for one pair."""
    scaled = [long_run("ml-1m", "literal", 5, 0, reattention_scale=scale) for scale in (0.3, 3)]
    return scaled + [paper("ml-1m", model, 5, **{**LONG, "epochs": 100}) for model in PAIR]


Setting = tuple[str, dict[str, Any]]  # a row of the table, and what is changed


@dataclass(frozen=True)
class Contest:
    """Settings of a network that compete on validation items, at ε = 5 with one seed."""

    data: str
    title: str
    settings: tuple[Setting, ...]

    def candidates(self) -> list[Cell]:
        return [paper(self.data, model, 5, **changes, validation=True) for model, changes in self.settings]

    def winner(self, load: Load) -> Setting | None:
        """The setting with the highest NDCG@10 of the last iterate, None before all are there."""
        found = [load(cell.name) for cell in self.candidates()]
        reached = [_reached(result) for result in found if result is not None]
        return self.settings[reached.index(max(reached))] if len(reached) == len(found) else None

    def finals(self, load: Load) -> list[Cell]:
        """The winner and the same with the other kind of attention, on test items, three seeds."""
        won = self.winner(load)
        if won is None:
            return []
        models = (won[0], *(model for model in PAIR if model != won[0]))
        return [
            paper(self.data, model, epsilon, seed, **won[1])
            for model in models
            for seed in (0, 1, 2)
            for epsilon in (5, 10)
        ]


def _reached(result: dict[str, Any]) -> float:
    last = result["curve"][-1]
    assert last["split"] == "validation", "a recipe is never chosen on test items"
    return float(last["masked"]["ndcg@10"])


def _both(*changes: dict[str, Any]) -> tuple[Setting, ...]:
    return tuple((model, change) for change in changes for model in PAIR)


BIAS: dict[str, Any] = {"frequency_bias": True}
COUNTS: dict[str, Any] = {"learning_rate": 2e-3, "warm_start": 0.5, "frequency_bias": True}
CONTESTS = (
    Contest(
        "ml-1m",
        "network alone",
        _both(
            BIAS,
            {"learning_rate": 0.014, **BIAS, "bands": 4},
            {"learning_rate": 7e-3, "epochs": 60, "batch_size": 1024, **BIAS},
            {"learning_rate": 4e-3, "epochs": 60, "batch_size": 1024, **BIAS},
        ),
    ),
    Contest(
        "games",
        "network alone",
        _both(
            BIAS,
            {"learning_rate": 0.02, **BIAS, "bands": 8},
            {"epochs": 40, "batch_size": 4096, **BIAS},
            {"learning_rate": 0.014, "epochs": 40, "batch_size": 4096, **BIAS, "bands": 4},
        ),
    ),
    Contest(
        "ml-1m",
        "from counts",
        _both(
            COUNTS,
            {**COUNTS, "learning_rate": 4e-3, "bands": 4},
            {**COUNTS, "epochs": 40, "batch_size": 1024},
        ),
    ),
    Contest(
        "games",
        "from counts",
        _both(
            COUNTS,
            {**COUNTS, "learning_rate": 5e-3, "bands": 8},
            {**COUNTS, "epochs": 40, "batch_size": 4096},
        ),
    ),
)


def redone() -> list[Cell]:
    """The other rows of the tables, which stood there with the numbers of an earlier build."""
    networks = [paper(data, model, e, **MET[data]) for data in REAL for e in EPSILONS for model in OTHERS]
    released = [counts(data, epsilon, seed) for data in REAL for epsilon in EPSILONS for seed in SEEDS]
    return [*map(floor, REAL), *released, *networks]


def queue(load: Load) -> list[Cell]:
    """Every run of this study, in the order in which they are worth their time."""
    return [
        *(long_run("ml-1m", model, 5, seed) for seed in (0, 1, 2) for model in PAIR),
        *parts(),
        *(long_run("ml-1m", model, epsilon, seed) for epsilon in (10, 8) for seed in (0, 1) for model in PAIR),
        *(long_run("games", model, epsilon, seed) for seed in (0, 1) for epsilon in (10, 5, 8) for model in PAIR),
        *more_seeds(),
        *stretched(),
        *(cell for contest in CONTESTS for cell in contest.candidates()),
        *(cell for contest in CONTESTS for cell in contest.finals(load)),
        *(language(model, epsilon) for epsilon in EPSILONS for model in PAIR),
        *heat_maps(*REAL),
        *redone(),
    ]


def everything(load: Load) -> list[Cell]:
    """Those, and every run of the tables besides, each once."""
    return list({cell.name: cell for cell in [*queue(load), *cells()]}.values())
