"""Recommendation: items of users in order of time, the last one held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dpformer.accounting.units import USER, UnitOfPrivacy
from dpformer.data import Dataset, Vocabulary, prepare, read_catalog, synthetic
from dpformer.data.time_split import COLD, TimeSplitDataset
from dpformer.errors import DpformerError
from dpformer.kinds.popularity import BASELINE
from dpformer.statement.data import data_statement
from dpformer.statement.public_facts import public_description

if TYPE_CHECKING:
    from dpformer.evaluation import Evaluation
    from dpformer.runs.config import Config
    from dpformer.runs.evaluation_cache import EvaluationCache
    from dpformer.runs.model_file import Release
    from dpformer.training.plan import Plan

MODEL = "model"  # as opposed to the baseline
SYNTHETIC_USERS, SYNTHETIC_ITEMS = 6000, 400  # synthetic data, hence public
NOT_COVERED = (
    "Measured on users' held-out items: these numbers are not covered by the privacy guarantee; keep them as private "
    "as the data."
)


@dataclass(frozen=True)
class RankingAccuracy:
    """Ranks of the same held-out items under the model and the baseline."""

    model: Evaluation
    baseline: Evaluation
    dataset: Dataset
    cold: Mapping[str, Evaluation] = field(default_factory=dict)  # for users without a history, by name
    kind = "ranking"

    def to_dict(
        self, ks: Sequence[int] = (10,), *, samples: int = 1000, names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """How it was measured, and the metrics of both, as JSON."""
        from dpformer.evaluation.breakdown import by_newness, by_popularity, warnings

        facts = self.model.to_dict(ks, samples=samples, names=names)
        of_baseline = self.baseline.metrics(ks, samples=samples, names=names)
        left_out = self.dataset.description.get("vocabulary", {}).get("interactions_dropped", 0)
        both = {MODEL: self.model, BASELINE.name: self.baseline}
        if isinstance(self.dataset, TimeSplitDataset):
            until = self.dataset.description["split"]["until"]
            facts["by_time"] = {"until": until, "parts": by_newness(both, self.cold, min(ks))}
        return {
            **facts,
            "by_popularity": by_popularity(both, min(ks)),
            "warnings": warnings(self.model, self.baseline, BASELINE.name, ks),
            "interactions_left_out": left_out,
            "covered": False,
            "note": NOT_COVERED,
            "metrics": {MODEL: facts["metrics"], BASELINE.name: of_baseline},
        }


class Recommend:
    """See `Task`."""

    thing, things = "item", "items"
    metadata_keys: frozenset[str] = frozenset()

    def read(self, config: Config, vocabulary: Vocabulary | None = None) -> Dataset:
        max_length = config.max_length or config.default_length
        if config.synthetic:
            users = config.users or SYNTHETIC_USERS
            return synthetic(0, users, SYNTHETIC_ITEMS, max_length=max_length, validation=config.validation)
        catalog = read_catalog(config.catalog) if config.catalog is not None else None
        if config.engine == "spark":
            log = self._in_cluster(config, catalog or vocabulary)
            return log if catalog is None or config.cache is None else log.with_attributes(catalog)
        assert config.file is not None
        dataset = prepare(
            config.file,
            columns=config.log_columns(),
            reading=config.reading(),
            vocabulary=vocabulary or catalog,
            drop_unknown_items=config.drop_unknown_items or vocabulary is not None,
            filters=config.filters(),
            max_length=max_length,
            validation=config.validation,
            users=config.users,
            split_at=config.split_at,
            cache=config.cache,
        )
        return dataset if catalog is None or vocabulary is not None else dataset.with_attributes(catalog)

    def _in_cluster(self, config: Config, catalog: Vocabulary | None) -> Dataset:
        """A log that stays in its cluster, from which counts need only sums, or that comes here as prepared data."""
        from dpformer.data.sources.spark import cluster_log, handed_over

        read = cluster_log if config.cache is None else partial(handed_over, cache=config.cache)
        log = read(
            config.file,
            columns=config.log_columns(),
            reading=config.reading(),
            vocabulary=catalog,
            drop_unknown_items=config.drop_unknown_items,
            filters=config.filters(),
            max_length=config.max_length or (None if config.cache is None else config.default_length),
            validation=config.validation,
            users=config.users,
        )
        return cast(Dataset, log)

    def read_again(self, config: Config, release: Release) -> Dataset:
        if config.engine == "spark" and config.cache is None:
            raise DpformerError(
                "the log of this run stayed in a cluster: give a log on this machine, of some users or all: dpformer "
                "evaluate RUN sample.parquet"
            )
        if config.items_policy == "catalog" and not config.synthetic:
            return self.read(config.replace(catalog=None), vocabulary_of(release))
        return self.read(config)

    def count_items(self, config: Config) -> int | None:
        if config.synthetic:
            return SYNTHETIC_ITEMS
        return None if config.catalog is None else len(read_catalog(config.catalog))

    def unit(self, config: Config) -> UnitOfPrivacy:
        return USER

    def sentences(self, config: Config, plan: Plan, items: int, tokens: str = "") -> list[str]:
        return data_statement(public_description(config, plan, items))

    def metadata(self, config: Config, dataset: Dataset) -> dict[str, Any]:
        return {}

    def evaluate(self, model: Any, dataset: Dataset, vocabulary: Vocabulary, config: Config) -> dict[str, Any]:
        from dpformer.evaluation import evaluate
        from dpformer.evaluation.evaluate import POLICIES
        from dpformer.evaluation.metrics import tracked
        from dpformer.kinds.ranking import ranker

        split = "validation" if config.validation else "test"
        result = evaluate(ranker(model, dataset, vocabulary), dataset, split=split)
        record: dict[str, Any] = {"split": split}
        for policy in POLICIES:
            ranks = getattr(result, policy)
            record[policy] = {metric.label(): float(metric(ranks)) for metric in tracked()}
        return record

    def line(self, record: dict[str, Any]) -> str:
        values = "  ".join(f"{name} {value:.4f}" for name, value in record["served"].items())
        return f"epoch {record['epoch']:g}: {values} on {record['split']} items, seen items excluded (not covered by ε)"

    def measure(
        self,
        config: Config,
        release: Release,
        other: Config | None = None,
        split: str = "test",
        *,
        filter_seen: bool = True,
        kept: EvaluationCache | None = None,
    ) -> RankingAccuracy:
        from dpformer.evaluation import Evaluation, evaluate
        from dpformer.kinds.ranking import ranker

        dataset, vocabulary = held_out_data(config, release, other), vocabulary_of(release)
        if split == "validation" and not dataset.validation:
            raise DpformerError("the run held out no validation items: train with --validation, or use --split test")

        def measured(split: str) -> dict[str, Evaluation]:
            rankers = {MODEL: ranker(release.model, dataset, vocabulary), BASELINE.name: BASELINE.ranker(dataset)}
            return {
                name: evaluate(score, dataset, split=split, filter_seen=filter_seen) for name, score in rankers.items()
            }

        by_time = isinstance(dataset, TimeSplitDataset)
        cold = measured(COLD) if by_time and len(dataset.held_out(COLD)[0]) else {}
        key = (dataset.hash, split, "seen left out" if filter_seen else "all ranked")
        if kept is not None and (before := kept.get(*key)) is not None:
            names = (MODEL, BASELINE.name)
            of_model, of_baseline = (Evaluation.of(dataset, split, filter_seen, before, name) for name in names)
            return RankingAccuracy(of_model, of_baseline, dataset, cold)
        of_model, of_baseline = measured(split).values()
        found = RankingAccuracy(of_model, of_baseline, dataset, cold)
        if kept is not None:
            kept.put({**found.model.measured(MODEL), **found.baseline.measured(BASELINE.name)}, *key)
        return found


def held_out_data(config: Config, release: Release, other: Config | None = None) -> Dataset:
    """The data of a run, prepared again with all its items, or a log of another config with the items of the model.

    If the item list was released from the data, the data has more items: they were not released, and a held-out one
    counts as a miss. In another log, items unknown to the model are dropped before the split.
    """
    read = Recommend().read
    if other is not None:
        # Item frequencies in the other log do not matter: the item list of the model is fixed.
        return read(
            other.replace(catalog=None, users=None), None if config.items_policy == "dp" else vocabulary_of(release)
        )
    dataset, known = Recommend().read_again(config, release), vocabulary_of(release)
    among = set(known.ids)
    due = [name for name in dataset.vocabulary.ids if config.items_policy != "dp" or name in among]
    if list(known.ids) != due:
        raise DpformerError(
            f"{config.file or 'the synthetic default'} has other items than the model, so it has changed since "
            "training: restore it, or give another log to evaluate on"
        )
    return dataset


def vocabulary_of(release: Release) -> Vocabulary:
    """The items of a model, as a `Vocabulary`."""
    return Vocabulary([str(name) for name in release.vocabulary], release.titles, "catalog")
