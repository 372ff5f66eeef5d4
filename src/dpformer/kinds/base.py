"""A kind of model: all that differs between what `--model` can name, in one object.

    chosen     `refuse`, `default_length`, `resolved`, `silent`: what a config may say, and what it leaves open
    planned    `mechanism`, `release`, `needs_frequencies`, `estimate`: what touches the data, and what it will take
    fitted     `fit`: from released numbers, or by training, to a model
    ranked     `ranker` for evaluation, `scoring` for recommendations and their reasons
    released   `classes`: what a model file may hold
    verified   `constants`, `follows`: what is in the model without having been trained follows from the releases
    exported   `export_folder`, where there is a format of its own besides ONNX
    described  `title`, `phrase`, `summary`, `pictures`

The command line and the config know kinds by the registry (`kinds.registry`) alone. Modules of kinds are imported to
show options, so they import torch only when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dpformer.errors import DpformerError

if TYPE_CHECKING:
    import numpy as np

    from dpformer.accounting.events import Event
    from dpformer.data.attributes import Attributes
    from dpformer.evaluation.rankers import Ranker
    from dpformer.findings import Finding
    from dpformer.kinds.scoring import Scoring
    from dpformer.queries.base import Query
    from dpformer.runs.config import Config
    from dpformer.runs.model_file import Release
    from dpformer.runs.session import Session
    from dpformer.training.plan import Plan


class Mechanism(NamedTuple):
    """What touches the data to fit a model: steps of training, or a query that the model is made of."""

    expected_batch_size: int
    steps: int
    noise_multiplier: float
    events: tuple[Event, ...] = ()  # of the query; training has its own


class Picture(NamedTuple):
    """What a model shows of itself, for the report: a matrix with a title."""

    title: str
    matrix: np.ndarray
    label: str


class ModelKind:
    """What `--model NAME` stands for."""

    name: ClassVar[str]
    title: str  # on pages
    phrase: str  # in a sentence: "a Transformer"
    summary: str = ""  # of the option --model
    classes: Mapping[str, str]  # class → module: what a model file may name. Arguments and tensors are all of it.
    silent: tuple[str, ...] = ()  # options that say nothing of it
    trains: bool = True  # by steps, with checkpoints on the way
    text: bool = True  # whether it can be a language model
    attention: bool = False  # whether there is attention for Re-Attention to correct

    def named_by(self, path: Path) -> dict[str, Any] | None:
        """Choices, if `--model PATH` means this kind; None if it does not."""
        return None

    # Chosen.

    def ignores(self, option: str, name: str) -> str:
        """The sentence on an option that is among `silent` and was given."""
        return f"{option} says nothing of a model that is {name}: leave it out"

    def refuse(self, config: Config) -> None:
        """Raises ValueError on what this kind cannot do. Messages are shown to users as they are."""
        if config.reattention and not self.attention:
            raise ValueError(f"Re-Attention needs attention, {config.model} has none: leave it out")
        if config.base is not None:
            raise ValueError("a checkpoint is named by --model FOLDER; leave base out")
        if config.lora:
            raise ValueError("lora is for checkpoints: give --model FOLDER, or leave it out")

    def default_length(self, config: Config) -> int | None:
        """Items of a history to train on; None: all of them."""
        return None

    def resolved(self, config: Config, users: int) -> dict[str, Any]:
        """What the config left open, given the public number of users."""
        return {}

    # Planned.

    @property
    def release(self) -> Query | None:
        """The query that the model is made of, which gets what others leave of the budget; None: training does."""
        return None

    def needs_frequencies(self, config: Config) -> bool:
        """Whether item frequencies have to be released for it."""
        return False

    def items_described(self, config: Config) -> bool:
        """Whether public attributes recommend items of which the data says little: popularity is worth more then."""
        return False

    def mechanism(self, config: Config, users: int, others: tuple[Event, ...]) -> Mechanism:
        """Calibrates it, beside other events that are paid for first."""
        raise NotImplementedError

    def estimate(self, config: Config, plan: Plan, items: int) -> dict[str, Any]:
        """Parameters, seconds and peak bytes of fitting it, measured on made-up histories."""
        raise NotImplementedError

    def effort(self, estimate: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The estimate for people."""
        raise NotImplementedError

    # Fitted.

    def fit(self, session: Session) -> Any:
        """The model of a run whose queries are answered."""
        raise NotImplementedError

    # Ranked.

    def ranker(self, model: Any) -> Ranker:
        """Places held-out items, for evaluation."""
        from dpformer.evaluation.evaluate import scorer
        from dpformer.evaluation.rankers import DenseRanker

        return DenseRanker(scorer(model), model.num_items)

    def scoring(self, model: Any) -> Scoring:
        """Scores of histories, their reasons, and similar items."""
        from dpformer.kinds.scoring import DenseScoring

        return DenseScoring(model)

    # Verified.

    def constants(self, config: Config, plan: Plan, release: Release) -> Finding:
        """What is in the model without having been trained must follow from what was released with noise."""
        raise NotImplementedError

    def follows(self, value: Any, release: Release, attributes: Attributes | None) -> tuple[bool | None, str]:
        """Whether the model is made of what its query released; and in words, None where that cannot be told.

        Args:
            value: what was released, restored from releases.safetensors: of `release`, else of popularity.
            release: the model file.
            attributes: of the public catalogue, if it was given.
        """
        return True, "the model is made of them"

    # Exported.

    exports_folder: ClassVar[bool] = False

    def export_folder(self, release: Release, folder: Path, statement: dict[str, Any]) -> list[Path]:
        """Writes the model into a new folder in a format of its own, with its statement; gives what is in it."""
        raise DpformerError(f"{self.title} has no format of its own; give a file: model.onnx")

    # Described.

    def description(self, config: Config) -> str:
        """What a model of this config is called on pages."""
        return self.title

    def pictures(self, model: Any, history: np.ndarray) -> list[Picture]:
        """What the model shows of itself after one history."""
        return []
