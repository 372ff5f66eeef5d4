"""The results of a run's queries: asked once before training, and restored from the checkpoint afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpformer.accounting.events import Event
from dpformer.data import Dataset, Vocabulary
from dpformer.noise import SecureRandom
from dpformer.queries.base import Query, Question
from dpformer.queries.popularity import PopularityQuery
from dpformer.queries.registry import all_queries, asked_queries, query_of

if TYPE_CHECKING:
    from dpformer.runs.config import Config
    from dpformer.training.plan import Plan


@dataclass(frozen=True)
class Released:
    """Values by query label, and their cost. Without privacy they are exact and cost nothing."""

    values: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    def value(self, query: Query) -> Any:
        """The result of a query, None if it was not asked."""
        return self.values.get(query.label)

    @property
    def popularity(self) -> Any:
        """The value with the popularity of items (`Popularity`, or transition counts); None if not asked."""
        popular = (self.value(query) for query in all_queries() if isinstance(query, PopularityQuery))
        return next((value for value in popular if value is not None), None)

    @property
    def item_list(self) -> np.ndarray | None:
        """The released items, by their numbers in the data; None if the list is public."""
        return None if self.popularity is None else self.popularity.item_list

    @property
    def frequencies(self) -> Tensor | None:
        """The share of users who have each item, (M,) float64."""
        return None if self.popularity is None else torch.from_numpy(self.popularity.frequencies.p)

    def vocabulary(self, dataset: Dataset) -> Vocabulary:
        """The items of the model: all of the data's, or the released ones."""
        if self.item_list is None:
            return dataset.vocabulary
        return Vocabulary([dataset.vocabulary.ids[number] for number in self.item_list.tolist()], None, "dp")

    def arrays(self, config: Config) -> dict[str, np.ndarray]:
        """The noisy numbers as released, for releases.safetensors; none without privacy."""
        found: dict[str, np.ndarray] = {}
        for label, value in self.values.items():
            query = query_of(label)
            if config.private and query is not None:
                found |= query.arrays(value, config)
        return found

    def state(self, config: Config) -> dict[str, dict[str, Tensor]]:
        """For the checkpoint: what `resumed` needs. Exact values are recomputed."""
        if not config.private:
            return {}
        return {label: self._state(label, value, config) for label, value in self.values.items()}

    @staticmethod
    def _state(label: str, value: Any, config: Config) -> dict[str, Tensor]:
        query = query_of(label)
        assert query is not None
        arrays = query.arrays(value, config) | query.private_arrays(value)
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def release_before_training(config: Config, plan: Plan, dataset: Dataset, random: SecureRandom) -> Released:
    """Ask all queries that the config needs before training, each once.

    The noise is a function of the run's key, the config and the data: a run that died afterwards releases the same
    values again. If an engine is named, its address leaves out the order of users, which a cluster does not have: every
    engine gives the same bytes under the same key.
    """
    data = dataset.hash if config.engine is None else dataset.unordered_hash
    random = random.within(f"releases config {config.hash()} data {data}")
    question, values, events = Question(config, dataset), {}, []
    for query in asked_queries(config):
        if query.after_training:
            continue
        if not config.private:
            values[query.label] = query.exact(question)
            continue
        answer = query.run(question, planned(plan, query), random.within(query.label))
        values[query.label] = answer.value
        events += [] if answer.event is None else [answer.event]
    return Released(values, tuple(events))


def resumed(config: Config, plan: Plan, dataset: Dataset, state: Mapping[str, Mapping[str, Tensor]]) -> Released:
    """The results released before a checkpoint was saved: nothing is drawn again."""
    if not config.private:
        return release_before_training(config, plan, dataset, SecureRandom("not used"))
    asked = [query for query in asked_queries(config) if not query.after_training]
    if [query.label for query in asked] != list(state):
        raise ValueError(f"it holds results of {', '.join(state) or 'no query'}, unlike the queries of this run")
    values = {
        query.label: query.restore({name: t.numpy() for name, t in state[query.label].items()}, config, plan)
        for query in asked
    }
    return Released(values, tuple(planned(plan, query) for query in asked))


def planned(plan: Plan, query: Query) -> Event:
    """The planned event of a query."""
    return next(event for event in plan.events if event.label == query.label)
