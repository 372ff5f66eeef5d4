"""The runs behind the paper's tables and figures, the most informative first.

    counts and floors  →  synthetic data: heat maps, one change at a time  →  ML-1M, ε = 5 and 10, vanilla and
    Re-Attention  →  started from counts  →  Games  →  other settings  →  the other rows  →  ε = 8  →  ablations
    →  TinyShakespeare  →  without privacy  →  seeds  →  heat maps  →  seeds of the rest

Within a group the cheap ones come first (`Cell.minutes`, of one core).

Two cores cannot carry 100 epochs × 5 seeds × everything. What counts for accuracy is the noise of a step, σ/B, and the
number of steps T: on MovieLens, at T = 236 and ε = 5, it is 2.46e-3 with B = 512 and 20 epochs, 2.13e-3 with B = 1,024
and 40 epochs, and 2.0e-3 with B = 2,560 and 100 epochs. So runs take 20 epochs (Games 10), at the paper's ε and with
everything else as in the paper; σ is calibrated for the shorter run. A pair of longer runs shows what that costs. One
learning rate a data set, from the training loss of a few steps, instead of the best of a grid for every cell. Heat
maps take 10 epochs and a coarser grid. TinyShakespeare takes a smaller model on shorter chunks.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpformer.errors import DpformerError
from dpformer.runs.config import Config

FILES = {
    "ml-1m": "ml-1m.txt",
    "games": "amazon-games.txt",
    "beauty": "s3-beauty.txt",
    "ml-100k": "ml-100k/u.data",
    "tinyshakespeare": "tinyshakespeare.txt",
}  # and the embedded synthetic data, which has none
TITLES = {
    "ml-1m": "MovieLens-1M",
    "games": "Amazon Games",
    "beauty": "Amazon Beauty",
    "ml-100k": "MovieLens-100K",
    "synthetic": "Synthetic data",
    "tinyshakespeare": "TinyShakespeare",
}
# The paper's δ is 1 / users.
USERS = {"ml-1m": 6_040, "games": 31_013, "beauty": 22_363, "ml-100k": 943, "synthetic": 6_000}
ITEMS = ("ml-1m", "games", "ml-100k", "synthetic")  # all but text
MODELS: dict[str, dict[str, Any]] = {
    "gru": {"model": "gru"},
    "lstm": {"model": "lstm"},
    "unshared": {"model": "transformer", "reattention": False, "shared": False},
    "vanilla": {"model": "transformer", "reattention": False},
    "reattention": {"model": "transformer", "reattention": True, "reattention_variant": "renormalised"},
    "literal": {"model": "transformer", "reattention": True, "reattention_variant": "literal"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ml-1m": {"learning_rate": 8e-3, "epochs": 20, "batch_size": 512, "max_length": 200, "dropout": 0.2},
    "games": {"learning_rate": 8e-3, "epochs": 10, "batch_size": 1024, "max_length": 50, "dropout": 0.5},
    "synthetic": {"learning_rate": 9e-3, "epochs": 10, "batch_size": 1024, "max_length": 50, "dropout": 0.2},
    "tinyshakespeare": {
        "learning_rate": 4e-3, "epochs": 20, "batch_size": 1024, "max_length": 64, "dropout": 0.0,
        "dim": 64, "heads": 2, "blocks": 2,
    },
}  # fmt: skip
EPOCH_MINUTES = {"ml-1m": 0.35, "games": 0.7, "synthetic": 0.1, "tinyshakespeare": 0.5}  # vanilla, one core
TIMES = {"gru": 0.8, "lstm": 0.8, "unshared": 1.0, "vanilla": 1.0, "reattention": 1.2, "literal": 1.2}
GRID: dict[str, Any] = {"batch_size": (512, 1024, 4096), "learning_rate": (1e-3, 5e-3, 9e-3), "epochs": 20}
SMALL_GRID: dict[str, Any] = {"batch_size": (256, 1024, 4096), "learning_rate": (1e-3, 3e-3, 9e-3), "epochs": 10}
GRIDS = {"ml-1m": GRID, "games": GRID, "synthetic": SMALL_GRID}
SEEDS = (0, 1, 2)
EPSILONS = (5, 8, 10)
CHOICES = (0.5, 1, 2, 4, 8, math.inf)  # budgets among which a user chooses
CHOSEN = ("ml-1m", "games", "beauty")  # data on which the choice is shown


@dataclass(frozen=True)
class Cell:
    """One run: a data set, the choices that make it different, and a name that tells both."""

    data: str
    label: str
    choices: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    minutes: float = 0.5  # about, on one core
    ablation: str | None = None  # a change that the product has no option for (`ablation.py`)

    @property
    def name(self) -> str:
        return f"{self.data}-{self.label}-seed{self.seed}"

    @property
    def trains(self) -> bool:
        """Whether it is a run of `dpformer train`, or the popularity of items, which needs none."""
        return bool(self.choices)

    def with_seed(self, seed: int) -> "Cell":
        return replace(self, seed=seed)

    @property
    def command(self) -> str:
        """The command line that does the same."""
        if not self.trains or self.ablation:
            return f"DPFORMER_DATA=FOLDER python -m experiments.fill {self.name}"
        file = [FILES[self.data]] if self.data in FILES else []
        return " ".join(["dpformer train", *file, *map(_flag, self.choices.items()), f"--seed {self.seed}"])

    def config(self) -> Config:
        """The config of `dpformer train`; data is found through DPFORMER_DATA."""
        file = data_file(self.data) if self.data in FILES else None
        return Config.make(**{"file": file, "seed": self.seed, **self.choices})


def data_file(data: str) -> Path:
    """The file of a data set, in the folder that DPFORMER_DATA names."""
    folder = os.environ.get("DPFORMER_DATA")
    if folder is None:
        raise DpformerError("DPFORMER_DATA is not set: give the folder of the data sets")
    return Path(folder) / FILES[data]


def paper(data: str, model: str, epsilon: float, seed: int = 0, **changes: Any) -> Cell:
    """The paper's recipe, with fewer epochs. The name tells the learning rate and what else was changed."""
    choices = {"recipe": "paper", **SETTINGS[data], **MODELS[model], "epsilon": epsilon, "evaluate_every": 5, **changes}
    told = {"learning_rate": choices["learning_rate"], **changes}
    label = f"{model}-eps{epsilon:g}" + "".join(f"-{name}={_short(value)}" for name, value in told.items())
    minutes = choices["epochs"] * EPOCH_MINUTES[data] * TIMES[model]
    return Cell(data, label, choices, seed, minutes)


TWO, OTHERS = ("vanilla", "reattention"), ("gru", "lstm", "unshared")
LONG_EPSILON = 5
LONG: dict[str, Any] = {"learning_rate": 7e-3, "epochs": 60, "batch_size": 1024, "evaluate_every": 10}


def decisive(seed: int, **changes: Any) -> list[Cell]:
    """Vanilla and Re-Attention, MovieLens at ε = 5, as long as it takes for both to be well above popularity."""
    return [paper("ml-1m", model, LONG_EPSILON, seed, **{**LONG, **changes}) for model in TWO]


GROWN = {"ml-1m": {"epochs": 40, "batch_size": 1024}, "games": {"epochs": 40, "batch_size": 4096}}
MET: dict[str, dict[str, Any]] = {"ml-1m": {}, "games": {"epochs": 20, "batch_size": 2048}}


def scaled() -> list[Cell]:
    """Re-Attention at that length with a weaker and a stronger correction."""
    return [paper("ml-1m", "reattention", 5, **LONG, reattention_scale=scale) for scale in (0.3, 3)]


def at_length(data: str) -> list[Cell]:
    """The rows of a table where they have grown: 40 epochs, 20 for those that are met by then. About 300 steps each."""
    others = [paper(data, model, epsilon, **MET[data]) for epsilon in (5, 10, 8) for model in OTHERS]
    return others + [paper(data, model, epsilon, **GROWN[data]) for epsilon in (8, 5, 10) for model in TWO]


def longest(data: str, epsilon: float, there: Callable[[Cell], bool]) -> dict[str, dict[str, Any]]:
    """For each row of a table the changes of its longest run; vanilla and Re-Attention are as long as each other."""
    long = [LONG, GROWN[data]] if data == "ml-1m" and epsilon == LONG_EPSILON else [GROWN[data]]
    both = [change for change in long if all(there(paper(data, model, epsilon, **change)) for model in TWO)]
    rows = {model: both[0] if both else {} for model in (*TWO, "literal")}
    return rows | {model: MET[data] if there(paper(data, model, epsilon, **MET[data])) else {} for model in OTHERS}


def warm(data: str, epsilon: float, seed: int = 0) -> Cell:
    """The vanilla Transformer of the tables, started from transition counts with half of the budget, in small steps."""
    return paper(data, "vanilla", epsilon, seed, learning_rate=2e-3, warm_start=0.5, frequency_bias=True)


def language(model: str, epsilon: float, seed: int = 0) -> Cell:
    """Characters of TinyShakespeare: the paper's recipe with a smaller model, shorter chunks and few epochs."""
    return paper_language(paper("tinyshakespeare", model, epsilon, seed))


def paper_language(cell: Cell) -> Cell:
    choices = {**cell.choices, "recipe": "paper-lm", "task": "lm", "unit": "chunk", "evaluate_every": 1}
    return Cell(cell.data, cell.label, choices, cell.seed, cell.minutes)


def counts(data: str, epsilon: float, seed: int = 0) -> Cell:
    """Transition counts: one release, no network, whole histories; δ and the public list of items as in the paper.

    The recipe would say both, and cut histories.
    """
    choices = {"model": "counts", "epsilon": epsilon, "delta": 1 / USERS[data]}
    if data in FILES:  # the items of synthetic data are public anyway
        choices["assume_items_public"] = True
    if data == "beauty":
        choices["columns"] = "user,items"  # one user per line
    return Cell(data, f"counts-eps{epsilon:g}", choices, seed)


def floor(data: str) -> Cell:
    """Items ranked by how often they occur: the floor, not private."""
    return Cell(data, "popularity")


def _flag(choice: tuple[str, Any]) -> str:
    name, value = choice
    flag = "re-attention" if name == "reattention" else name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    short = _short(value)
    exact = isinstance(value, str) or float(short) == value
    return f"--{flag} {short if exact else repr(value)}"


def _short(value: Any) -> str:
    return str(value) if isinstance(value, bool | str) else f"{value:g}"


# Groups, in the order in which they are worth their time.


def floors() -> list[Cell]:
    return [floor(data) for data in ITEMS]


def counted(seeds: tuple[int, ...] = SEEDS) -> list[Cell]:
    return [counts(data, epsilon, seed) for seed in seeds for epsilon in EPSILONS for data in ITEMS]


def by_budget(seeds: tuple[int, ...] = SEEDS) -> list[Cell]:
    """Counts from a small budget to none at all, for the page on choosing ε; without noise one seed says it."""
    return [
        counts(data, epsilon, seed)
        for seed in seeds
        for epsilon in CHOICES
        for data in CHOSEN
        if seed == 0 or math.isfinite(epsilon)
    ]


def table(data: str, models: tuple[str, ...], epsilons: tuple[float, ...], seed: int = 0) -> list[Cell]:
    return [paper(data, model, epsilon, seed) for epsilon in epsilons for model in models]


def longer() -> list[Cell]:
    """More epochs in larger batches: as many steps with less noise, or more steps. The last two are as long as the
    paper's."""
    pair = [paper("ml-1m", model, 10, epochs=40, batch_size=1024) for model in ("vanilla", "reattention")]
    sizes = ((60, 1024), (100, 2560), (100, 1024))
    return [*pair, *(paper("ml-1m", "vanilla", 10, epochs=epochs, batch_size=batch) for epochs, batch in sizes)]


def other_settings() -> list[Cell]:
    """What else was tried for the same time: shorter histories, larger batches with fewer and longer steps."""
    return [
        paper("ml-1m", "vanilla", 10, max_length=50),
        paper("ml-1m", "vanilla", 10, batch_size=2048, learning_rate=0.03),
        paper("games", "vanilla", 10, batch_size=8192, learning_rate=0.03),
    ]


def correlated() -> list[Cell]:
    """Noise that is correlated over some steps. A step has more of it: Adam needs larger ones for the same signal."""
    return [
        paper("ml-1m", "vanilla", 10, bands=8, learning_rate=0.02),
        paper("ml-1m", "vanilla", 10, learning_rate=0.014),  # what a larger rate does by itself
        paper("games", "vanilla", 10, bands=16, learning_rate=0.03),
        paper("ml-1m", "vanilla", 5, bands=3, learning_rate=0.014),
        paper("games", "vanilla", 5, bands=8, learning_rate=0.02),
    ]


def warm_in_bands() -> list[Cell]:
    """Started from counts, with correlated noise, in steps about twice as large."""
    start = {"warm_start": 0.5, "frequency_bias": True}
    return [
        paper("games", "vanilla", 10, learning_rate=0.005, **start, bands=8),
        paper("ml-1m", "vanilla", 10, learning_rate=0.004, **start, bands=4),
    ]


def ablations() -> list[Cell]:
    """One change at a time, MovieLens at ε = 5: how Re-Attention is scaled and written, and what else may help."""
    changes: list[tuple[str, dict[str, Any]]] = [
        ("vanilla", {"frequency_bias": True}),
        ("vanilla", {"batch_size": 3020}),
        ("vanilla", {"norm": "pre"}),
        ("vanilla", {"dim": 32}),
        ("reattention", {"reattention_scale": 0.1}),
        ("reattention", {"reattention_scale": 0.3}),
        ("reattention", {"reattention_variant": "literal"}),
        ("reattention", {"frequency_bias": True}),
    ]
    return [paper("ml-1m", model, 5, **change) for model, change in changes]


def cheap(seed: int = 0) -> list[Cell]:
    """One change at a time, synthetic data at a small ε, where seeds are cheap."""
    changes: list[tuple[str, dict[str, Any]]] = [
        ("vanilla", {}),
        ("vanilla", {"frequency_bias": True}),
        ("vanilla", {"clipping": "clip"}),
        ("vanilla", {"norm": "pre"}),
        ("vanilla", {"dim": 32}),
        ("vanilla", {"batch_size": 3000}),
        ("vanilla", {"warm_start": 0.5}),
        ("vanilla", {"bands": 2, "learning_rate": 0.015}),
        ("reattention", {}),
        ("reattention", {"reattention_scale": 0.3}),
        ("reattention", {"reattention_scale": 3}),
        ("reattention", {"reattention_variant": "literal"}),
    ]
    return [paper("synthetic", model, 1, seed, **change) for model, change in changes]


def shakespeare(seed: int = 0) -> list[Cell]:
    return [language(model, epsilon, seed) for epsilon in EPSILONS for model in ("vanilla", "reattention")] + [
        ceiling("tinyshakespeare", seed)
    ]


def ceiling(data: str, seed: int = 0) -> Cell:
    """The same network without clipping and noise, in small batches."""
    if data == "tinyshakespeare":
        return paper_language(paper(data, "vanilla", math.inf, seed, batch_size=128, learning_rate=1e-3))
    return paper(data, "vanilla", math.inf, seed, batch_size=128, learning_rate=1e-3)


HEAT_MAPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "ml-1m": [("vanilla", {}), ("unshared", {}), ("unshared", {"dim": 32})],
    "games": [("vanilla", {}), ("literal", {})],
    "synthetic": [("vanilla", {}), ("reattention", {}), ("unshared", {}), ("unshared", {"dim": 32})],
}
HEAT_EPSILON = {"ml-1m": 5, "games": 8, "synthetic": 5}


def heat_map(data: str, model: str, **changes: Any) -> list[Cell]:
    """Batch × learning rate, few epochs."""
    grid = GRIDS[data]
    return [
        paper(data, model, HEAT_EPSILON[data], **changes, batch_size=batch, learning_rate=rate, epochs=grid["epochs"])
        for batch in grid["batch_size"]
        for rate in grid["learning_rate"]
    ]


def heat_maps(*names: str) -> list[Cell]:
    return [cell for data in names for model, change in HEAT_MAPS[data] for cell in heat_map(data, model, **change)]


def cells() -> list[Cell]:
    """Every run, each once."""
    two, others = TWO, OTHERS
    groups = [
        *(decisive(seed) for seed in (1, 2, 0)),
        scaled(),
        at_length("ml-1m"),
        at_length("games"),
        floors(),
        counted(),
        by_budget(),
        heat_maps("synthetic"),
        [cell for seed in SEEDS for cell in cheap(seed)],
        table("ml-1m", two, (10, 5)),
        [warm(data, epsilon) for data in ("ml-1m", "games") for epsilon in (5, 10)],
        table("games", two, (10, 5)),
        longer() + other_settings() + correlated() + warm_in_bands(),
        table("ml-1m", others, (5, 10)) + table("games", others, (5, 10)),
        [cell for data in ("ml-1m", "games") for cell in [*table(data, two, (8,)), warm(data, 8)]],
        ablations(),
        shakespeare(),
        [ceiling("ml-1m"), ceiling("games")],
        *([*table("ml-1m", two, (10, 5), seed), *table("games", two, (10, 5), seed)] for seed in SEEDS[1:]),
        [cell for data in ("ml-1m", "games") for cell in table(data, others, (8,))],
        heat_maps("ml-1m", "games"),
        *([cell for data in ("ml-1m", "games") for cell in table(data, others, EPSILONS, seed)] for seed in SEEDS[1:]),
        *([*table("ml-1m", two, (8,), seed), *table("games", two, (8,), seed)] for seed in SEEDS[1:]),
    ]
    ordered = [cell for group in groups for cell in sorted(group, key=lambda cell: cell.minutes)]
    return list({cell.name: cell for cell in ordered}.values())
