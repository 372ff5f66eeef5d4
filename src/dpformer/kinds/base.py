"""A kind of model: everything that differs between the models `--model` can name, in one object.

    chosen     `refuse`, `default_length`, `resolved`, `silent`: valid options, and defaults that depend on the data
    planned    `mechanism`, `release`, `needs_frequencies`, `estimate`: what touches the data, and the time it takes
    fitted     `fit`: from released numbers, or by training, to a model
    ranked     `ranker` for evaluation, `scoring` for recommendations and explanations
    released   `classes`: what a model file may contain
    verified   `constants`, `follows`: untrained constants of the model must follow from the releases
    exported   `export_folder`, if it has a format of its own besides ONNX
    described  `title`, `phrase`, `summary`, `pictures`

The command line and the config know kinds only through the registry (`kinds.registry`). Modules of kinds are imported
to show options, so they import torch only when needed.
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
    from dpformer.models.vectors import Vectors
    from dpformer.queries.base import Query
    from dpformer.runs.config import Config
    from dpformer.runs.model_file import Release
    from dpformer.runs.session import Session
    from dpformer.training.plan import Plan


class Mechanism(NamedTuple):
    """What touches the data to fit a model: training steps, or a query whose result is the model."""

    expected_batch_size: int
    steps: int
    noise_multiplier: float
    events: tuple[Event, ...] = ()  # events of the query; training has its own


class Picture(NamedTuple):
    """A matrix with a title that a model shows of itself in the report."""

    title: str
    matrix: np.ndarray
    label: str


class ModelKind:
    """The model that `--model NAME` stands for."""

    name: ClassVar[str]
    title: str  # for pages
    phrase: str  # for sentences: "a Transformer"
    summary: str = ""  # for the help of --model
    classes: Mapping[str, str]  # class → module: the classes a model file may name, rebuilt from arguments and tensors
    silent: tuple[str, ...] = ()  # options that do not apply to it
    trains: bool = True  # in steps, with checkpoints
    text: bool = True  # whether it can be a language model
    counted: bool = False  # whether it is made of counts, to which `repeat_weight` and an earlier run apply
    attention: bool = False  # whether it has attention that Re-Attention can correct

    def named_by(self, path: Path) -> dict[str, Any] | None:
        """The options implied if `--model PATH` means this kind; None if it does not."""
        return None

    # Chosen.

    def ignores(self, option: str, name: str) -> str:
        """The message for a given option that is among `silent`."""
        return f"{option} does not apply to the model {name}: omit it"

    def refuse(self, config: Config) -> None:
        """Raise ValueError for options that this kind does not support. Messages are shown to users verbatim."""
        if config.reattention and not self.attention:
            raise ValueError(f"Re-Attention needs attention, but {config.model} has none: omit it")
        if config.repeat_weight and not self.counted:
            raise ValueError(f"repeat_weight applies to counts, but model is {config.model}: omit it")
        for name in ("event_weights", "session_gap"):
            if getattr(config, name) and not self.counted:
                raise ValueError(
                    f"{name} applies to counts, but model is {config.model}: omit it, or select events with where"
                )
        if config.base is not None:
            raise ValueError("a checkpoint is given by --model FOLDER: omit base")
        if config.lora:
            raise ValueError("lora applies to checkpoints: give --model FOLDER, or omit it")

    def default_length(self, config: Config) -> int | None:
        """Training items per history; None: all of them."""
        return None

    def resolved(self, config: Config, users: int) -> dict[str, Any]:
        """Values for options that the config left open, given the public number of users."""
        return {}

    def without_share(self, config: Config, option: str) -> str:
        """The message if a query that the config needs has no share of the budget."""
        return f"{option} is 0, but the run needs its query: give more"

    # Planned.

    @property
    def release(self) -> Query | None:
        """The query whose result is the model, which gets the remaining budget; None if training does."""
        return None

    def needs_frequencies(self, config: Config) -> bool:
        """Whether it needs released item frequencies."""
        return False

    def items_described(self, config: Config) -> bool:
        """Whether the model uses public attributes, so that what they say about users is worth asking."""
        return False

    def mechanism(self, config: Config, users: int, others: tuple[Event, ...]) -> Mechanism:
        """Calibrate it, given other events that are paid for first."""
        raise NotImplementedError

    def estimate(self, config: Config, plan: Plan, items: int) -> dict[str, Any]:
        """Parameters, seconds and peak bytes of fitting it, measured on random histories."""
        raise NotImplementedError

    def effort(self, estimate: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The estimate as names and values for printing."""
        raise NotImplementedError

    # Fitted.

    def fit(self, session: Session) -> Any:
        """The model of a run whose queries have been answered."""
        raise NotImplementedError

    # Ranked.

    def ranker(self, model: Any) -> Ranker:
        """The ranker of held-out items, for evaluation."""
        from dpformer.evaluation.evaluate import scorer
        from dpformer.evaluation.rankers import DenseRanker

        return DenseRanker(scorer(model), model.num_items)

    def scoring(self, model: Any) -> Scoring:
        """Scores for histories, their explanations, and similar items."""
        from dpformer.kinds.scoring import DenseScoring

        return DenseScoring(model)

    def vectors(self, model: Any, dim: int | None) -> Vectors:
        """Item and query vectors whose inner products are the scores; `dim` is for kinds that have no own."""
        raise DpformerError(f"{self.title} has no item vectors")

    # Verified.

    def constants(self, config: Config, plan: Plan, release: Release) -> Finding:
        """Check that untrained parts of the model follow from what was released with noise."""
        raise NotImplementedError

    def follows(
        self, config: Config, value: Any, release: Release, attributes: Attributes | None
    ) -> tuple[bool | None, str]:
        """Whether the model follows from its query's release; None if that cannot be determined; and a sentence.

        Args:
            value: the released value, restored from releases.safetensors: that of `release`, otherwise popularity.
            release: the model file.
            attributes: attributes in the public catalogue, if it was given.
        """
        return True, "the model follows from them"

    # Exported.

    exports_folder: ClassVar[bool] = False

    def export_folder(self, release: Release, folder: Path, statement: dict[str, Any]) -> list[Path]:
        """Write the model to a new folder in its own format, with its statement; returns the files."""
        raise DpformerError(f"{self.title} has no export format of its own: give a file such as model.onnx")

    # Described.

    def description(self, config: Config) -> str:
        """The name of a model with this config on pages."""
        return self.title

    def pictures(self, model: Any, history: np.ndarray) -> list[Picture]:
        """What the model shows of itself for one history."""
        return []
