"""Tasks: what a run is for. Each knows how to read its data, evaluate a model, describe and name things.

Nothing else asks which task it is: it takes `task_of(config)` and uses what `Task` names.
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
    """What differs between items of users and text."""

    thing: str  # what a sequence is made of
    things: str
    metadata_keys: frozenset[str]  # what the model file says besides what every one says

    def read(self, config: Config, vocabulary: Vocabulary | None = None) -> Dataset:
        """The prepared data, whole; nothing is released. `vocabulary` is that of a model: others are left out."""

    def read_again(self, config: Config, release: Release) -> Dataset:
        """The data of a finished run, with the public vocabulary of its model: no file but the data is opened."""

    def count_items(self, config: Config) -> int | None:
        """How many items there are, as far as it is public before the data is read."""

    def unit(self, config: Config) -> UnitOfPrivacy:
        """What one sample is, and what is protected."""

    def sentences(self, config: Config, plan: Plan, items: int, tokens: str = "") -> list[str]:
        """On the data, for the statement: from public facts alone, so that `verify` can make them again."""

    def metadata(self, config: Config, dataset: Dataset) -> dict[str, Any]:
        """For the model file."""

    def evaluate(self, model: Any, dataset: Dataset, vocabulary: Vocabulary, config: Config) -> dict[str, Any]:
        """The record of an evaluation during training, of a model with these items. Exact, and not covered."""

    def line(self, record: dict[str, Any]) -> str:
        """The same for the terminal."""

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
        """The accuracy of a released model on held-out data: the run's own, or that of a log read by another config.

        What was measured before is taken from `kept`, where there is such a thing, and else put there.
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
    """The prepared data of a config, with all its items. Nothing is released by reading it.

    Args:
        config: which file, and how to read it.
        vocabulary: of a model that is there already; items outside it are left out.
    """
    return task_of(config).read(config, vocabulary)


__all__ = ["Measured", "Task", "load_dataset", "task_of"]
