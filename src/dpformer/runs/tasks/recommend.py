"""Recommending: items of users in the order of time, the last one held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpformer.data import (
    Dataset,
    Filters,
    PrivateVocabulary,
    Vocabulary,
    data_statement,
    prepare,
    read_catalog,
    synthetic,
)
from dpformer.errors import DpformerError
from dpformer.privacy import SecureRandom
from dpformer.privacy.units import USER, UnitOfPrivacy

if TYPE_CHECKING:
    from dpformer.evaluation import Evaluation
    from dpformer.runs.config import Config
    from dpformer.runs.model_file import Release

SYNTHETIC_USERS, SYNTHETIC_ITEMS = 6000, 400  # of the synthetic default: made up, so public
NOT_COVERED = (
    "Measured on users' own held-out items: the privacy guarantee does not cover these numbers, keep them as private "
    "as the data."
)


@dataclass(frozen=True)
class RankingAccuracy:
    """Ranks of the same held-out items under a model and under popularity."""

    model: Evaluation
    popularity: Evaluation
    dataset: Dataset
    kind = "ranking"

    def to_dict(self, ks: Sequence[int] = (10,), *, samples: int = 1000) -> dict[str, Any]:
        """What was measured how, and the metrics of both, as JSON."""
        facts = self.model.to_dict(ks, samples=samples)
        metrics = {"model": facts.pop("metrics"), "popularity": self.popularity.metrics(ks, samples=samples)}
        left_out = self.dataset.description.get("vocabulary", {}).get("interactions_dropped", 0)
        return {**facts, "interactions_left_out": left_out, "covered": False, "note": NOT_COVERED, "metrics": metrics}


class Recommend:
    """See `Task`."""

    thing, things = "item", "items"
    metadata_keys: frozenset[str] = frozenset()

    def read(self, config: Config, random: SecureRandom | None = None, vocabulary: Vocabulary | None = None) -> Dataset:
        max_length = config.max_length or config.default_length
        if config.file is None:
            return synthetic(0, SYNTHETIC_USERS, SYNTHETIC_ITEMS, max_length=max_length, validation=config.validation)
        private = _private_vocabulary(config) if vocabulary is None else None
        catalog = read_catalog(config.catalog) if config.catalog is not None else None
        dataset = prepare(
            config.file,
            columns=config.log_columns(),
            reading=config.reading(),
            vocabulary=vocabulary or private or catalog,
            drop_unknown_items=config.drop_unknown_items or vocabulary is not None,
            filters=Filters(config.min_rating, config.min_user_actions),
            max_length=max_length,
            validation=config.validation,
            cache=None if private is not None else config.cache,  # a release belongs to one run and its key
            normal=_normal(random) if private is not None and random is not None else None,
        )
        return dataset if catalog is None or vocabulary is not None else dataset.with_attributes(catalog)

    def count_items(self, config: Config) -> int | None:
        if config.file is None:
            return SYNTHETIC_ITEMS
        return None if config.catalog is None else len(read_catalog(config.catalog))

    def unit(self, config: Config) -> UnitOfPrivacy:
        return USER

    def sentences(self, dataset: Dataset) -> list[str]:
        return data_statement(dataset.description)

    def metadata(self, config: Config, dataset: Dataset) -> dict[str, Any]:
        return {}

    def evaluate(self, model: Any, dataset: Dataset, config: Config) -> dict[str, Any]:
        from dpformer.evaluation import evaluate, hit, ndcg
        from dpformer.evaluation.evaluate import scorer

        split = "validation" if config.validation else "test"
        result = evaluate(scorer(model), dataset, split=split)
        record: dict[str, Any] = {"split": split}
        for policy, ranks in (("masked", result.masked), ("unmasked", result.unmasked)):
            record[policy] = {"ndcg@10": float(ndcg(ranks, 10)), "hit@10": float(hit(ranks, 10))}
        return record

    def line(self, record: dict[str, Any]) -> str:
        masked = record["masked"]
        return (
            f"epoch {record['epoch']:g}: ndcg@10 {masked['ndcg@10']:.4f}  hit@10 {masked['hit@10']:.4f} "
            f"on {record['split']} items, seen ones masked (not covered by ε)"
        )

    def measure(
        self, config: Config, release: Release, data: Path | None = None, split: str = "test"
    ) -> RankingAccuracy:
        from dpformer.evaluation import evaluate, popularity
        from dpformer.evaluation.evaluate import scorer

        dataset = held_out_data(config, release, data)
        if split == "validation" and not dataset.validation:
            raise DpformerError("the run held out no validation items; train it with --validation, or use --split test")
        return RankingAccuracy(
            evaluate(scorer(release.model), dataset, split=split),
            evaluate(popularity(dataset), dataset, split=split),
            dataset,
        )


def held_out_data(config: Config, release: Release, data: Path | None = None) -> Dataset:
    """The data of a run prepared again, or another log with the run's vocabulary; items outside it are left out."""
    read = Recommend().read
    if data is not None and (config.file is None or data.resolve() != config.file.resolve()):
        # Which items are common here has no say: the model has the items it has.
        other = config.but(file=data, catalog=None, private_vocabulary=False)
        return read(other, vocabulary=_vocabulary(release))
    if config.private_vocabulary:  # it was drawn once: drawing it again would spend budget again
        return read(config, vocabulary=_vocabulary(release))
    dataset = read(config)
    if list(dataset.vocabulary.ids) != [str(name) for name in release.vocabulary]:
        raise DpformerError(
            f"{config.file or 'the synthetic default'} has other items than the model: it has changed since training; "
            "bring it back as it was, or name another log to evaluate on"
        )
    return dataset


def _vocabulary(release: Release) -> Vocabulary:
    return Vocabulary([str(name) for name in release.vocabulary], release.titles, "catalog")


def _normal(random: SecureRandom) -> Callable[[int], np.ndarray]:
    """Standard normal numbers, other ones at each call, and the same ones again in the same run."""
    calls, numbers = count(), random.within("vocabulary")
    return lambda size: numbers.normal(size, step=next(calls))


def _private_vocabulary(config: Config) -> PrivateVocabulary | None:
    if not config.private_vocabulary or not config.private:
        return None
    from dpformer.runs.planning import VOCABULARY_DELTA, other_events

    assert config.delta is not None
    noise = next(event.noise_multiplier for event in other_events(config) if event.label == "vocabulary")
    return PrivateVocabulary(noise_multiplier=noise, delta=VOCABULARY_DELTA * config.delta)
