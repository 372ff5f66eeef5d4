"""The accuracy of a run on held-out items, with popularity beside it. None of it is covered by the guarantee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpformer.data import Dataset, Vocabulary
from dpformer.data.text import TextDataset
from dpformer.errors import DpformerError
from dpformer.evaluation import Evaluation, evaluate, popularity
from dpformer.evaluation.evaluate import scorer
from dpformer.evaluation.language import language_loss
from dpformer.runs.start import load_dataset

if TYPE_CHECKING:
    from dpformer.runs.config import Config
    from dpformer.runs.model_file import Release
    from dpformer.runs.run import Run

NOT_COVERED = (
    "Measured on users' own held-out items: the privacy guarantee does not cover these numbers, keep them as private "
    "as the data."
)


@dataclass(frozen=True)
class Accuracy:
    """Ranks of the same held-out items under a model and under popularity."""

    model: Evaluation
    popularity: Evaluation
    dataset: Dataset

    def to_dict(self, ks: Sequence[int] = (10,), *, samples: int = 1000) -> dict[str, Any]:
        """What was measured how, and the metrics of both, as JSON."""
        facts = self.model.to_dict(ks, samples=samples)
        metrics = {"model": facts.pop("metrics"), "popularity": self.popularity.metrics(ks, samples=samples)}
        left_out = self.dataset.description.get("vocabulary", {}).get("interactions_dropped", 0)
        return {**facts, "interactions_left_out": left_out, "covered": False, "note": NOT_COVERED, "metrics": metrics}


def measure(run: Run, data: str | Path | None = None, *, split: str = "test") -> Accuracy:
    """Ranks the held-out items of the run's own data, or of another log, by the released model and by popularity."""
    if run.config.task == "lm":
        raise DpformerError(f"{run.folder} is a language model, which ranks nothing: use dpformer evaluate")
    release, dataset = run.release, held_out_data(run, data)
    if split == "validation" and not dataset.validation:
        raise DpformerError("the run held out no validation items; train it with --validation, or use --split test")
    return Accuracy(
        evaluate(scorer(release.model), dataset, split=split),
        evaluate(popularity(dataset), dataset, split=split),
        dataset,
    )


def measure_text(run: Run, data: str | Path | None = None) -> dict[str, Any]:
    """The loss of a language model on the text held out from it, or on that of another file."""
    dataset = load_dataset(run.config if data is None else run.config.but(file=Path(data)))
    assert isinstance(dataset, TextDataset)
    return language_loss(run.release.model, dataset.held_out_text, dataset.held_out_characters).to_dict()


def held_out_data(run: Run, data: str | Path | None = None) -> Dataset:
    """The data of a run prepared again, or another log with the run's vocabulary; items outside it are left out."""
    config, release = run.config, run.release
    path = None if data is None else Path(data)
    if path is not None and (config.file is None or path.resolve() != config.file.resolve()):
        # Which items are common here has no say: the model has the items it has.
        other = config.but(file=path, min_item_actions=0, catalog=None, private_vocabulary=False)
        return load_dataset(other, vocabulary=_vocabulary(release))
    if config.private_vocabulary:  # it was drawn once: drawing it again would spend budget again
        return load_dataset(config, vocabulary=_vocabulary(release))
    return _same_items(load_dataset(config), release, config)


def _vocabulary(release: Release) -> Vocabulary:
    return Vocabulary([str(name) for name in release.vocabulary], release.titles, "catalog")


def _same_items(dataset: Dataset, release: Release, config: Config) -> Dataset:
    if list(dataset.vocabulary.ids) != [str(name) for name in release.vocabulary]:
        raise DpformerError(
            f"{config.file or 'the synthetic default'} has other items than the model: it has changed since training; "
            "bring it back as it was, or name another log to evaluate on"
        )
    return dataset
