"""The runs behind the paper's tables and figures, the most informative first.

    ML-1M, ε = 5 and 10, vanilla and Re-Attention  →  Games  →  the other rows  →  ablations  →  seeds

Two cores cannot carry 100 epochs × 5 seeds × everything. What counts for accuracy is the noise of a step, σ/B, and the
number of steps T: at T = 236 and ε = 5 it is 2.13e-3 with B = 1024 and 40 epochs, and 2.0e-3 with B = 2,560 and 100
epochs. So runs take 40 epochs, at the paper's ε and with everything else as in the paper.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpformer.errors import DpformerError
from dpformer.training.config import Config

FILES = {"ml-1m": "ml-1m.txt", "games": "amazon-games.txt", "tinyshakespeare": "tinyshakespeare.txt"}
MODELS: dict[str, dict[str, Any]] = {
    "vanilla": {"reattention": False},
    "reattention": {"reattention": True},
    "unshared": {"reattention": False, "shared": False},
    "gru": {"model": "gru"},
    "lstm": {"model": "lstm"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ml-1m": {"epochs": 40, "batch_size": 1024, "max_length": 200, "dropout": 0.2},
    "games": {"epochs": 20, "batch_size": 2048, "max_length": 50, "dropout": 0.5},
}


@dataclass(frozen=True)
class Cell:
    """One run: a data set, the choices that make it different, and a name that tells both."""

    data: str
    label: str
    choices: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.data}-{self.label}-seed{self.seed}"

    def config(self) -> Config:
        """The config of `dpformer train`; data is found through DPFORMER_DATA."""
        folder = os.environ.get("DPFORMER_DATA")
        if folder is None:
            raise DpformerError("DPFORMER_DATA is not set: give the folder of the data sets")
        return Config.make(**{"file": Path(folder) / FILES[self.data], "seed": self.seed, **self.choices})


def paper(data: str, model: str, epsilon: float, seed: int = 0, **changes: Any) -> Cell:
    """The paper's recipe, with fewer epochs."""
    choices = {"recipe": "paper", **SETTINGS[data], **MODELS[model], "epsilon": epsilon, "evaluate_every": 5, **changes}
    told = "".join(f"-{name}={value:g}" for name, value in changes.items())
    return Cell(data, f"{model}-eps{epsilon:g}{told}", choices, seed)


def cells() -> list[Cell]:
    """Every run, in the order in which they are worth their time."""
    return [
        paper("ml-1m", "vanilla", 10, learning_rate=8e-3),
        paper("ml-1m", "vanilla", 10, learning_rate=4e-3),
    ]
