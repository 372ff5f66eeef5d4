"""Tasks: what a run is for. A task knows how to read its data, evaluate a model, and describe things.

No other code compares tasks; it calls `task_of(config)` and uses the methods of `Task`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dpformer.runs.tasks.recommend import Recommend
from dpformer.runs.tasks.text import Text

if TYPE_CHECKING:
    from dpformer.accounting.units import UnitOfPrivacy
    from dpformer.data import Dataset, Vocabulary
    from dpformer.runs.config import Config
    from dpformer.runs.evaluation_cache import EvaluationCache
    from dpformer.runs.model_file import Release
    from dpformer.training.plan import Plan


class Task(Protocol):
    """What differs between users' items and text."""

    thing: str  # the elements of a sequence
    things: str
    metadata_keys: frozenset[str]  # metadata of the model file beyond the common keys

    def read(self, config: Config, vocabulary: Vocabulary | None = None) -> Dataset:
        """All prepared data; nothing is released. With the `vocabulary` of a model, other items are dropped."""

    def read_again(self, config: Config, release: Release) -> Dataset:
        """The data of a finished run, with the public vocabulary of its model; no other file is opened."""

    def count_items(self, config: Config) -> int | None:
        """The number of items, if it is public before the data is read."""

    def unit(self, config: Config) -> UnitOfPrivacy:
        """What one sample is, and what is protected."""

    def sentences(self, config: Config, plan: Plan, items: int, tokens: str = "") -> list[str]:
        """Sentences about the data for the statement, from public facts alone, so that `verify` can rebuild them."""

    def metadata(self, config: Config, dataset: Dataset) -> dict[str, Any]:
        """Metadata for the model file."""

    def evaluate(self, model: Any, dataset: Dataset, vocabulary: Vocabulary, config: Config) -> dict[str, Any]:
        """The record of an evaluation during training. Exact, and not covered by ε."""

    def line(self, record: dict[str, Any]) -> str:
        """The same as a line for the terminal."""

    def measure(
        self,
        config: Config,
        release: Release,
        other: Config | None = None,
        split: str = "test",
        *,
        filter_seen: bool = True,
        kept: EvaluationCache | None = None,
    ) -> Measured:
        """The accuracy of a released model on held-out data: the run's own, or a log read by another config.

        Earlier results are read from `kept`, if given, and new ones stored there.
        """


class Measured(Protocol):
    """Accuracy, not covered by the guarantee."""

    kind: str  # "ranking" or "language": what the facts look like

    def to_dict(
        self, ks: Sequence[int] = (10,), *, samples: int = 1000, names: Sequence[str] | None = None
    ) -> dict[str, Any]: ...


_TASKS: dict[str, Task] = {"recommend": Recommend(), "lm": Text()}


def task_of(config: Config) -> Task:
    """The task of a config."""
    return _TASKS[config.task]


def load_dataset(config: Config, vocabulary: Vocabulary | None = None) -> Dataset:
    """The prepared data of a config, with all its items. Reading it releases nothing.

    Args:
        config: which file, and how to read it.
        vocabulary: the vocabulary of an existing model; other items are dropped.
    """
    return task_of(config).read(config, vocabulary)


__all__ = ["Measured", "Task", "load_dataset", "task_of"]
