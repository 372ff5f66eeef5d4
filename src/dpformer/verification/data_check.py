"""Checks with the data: users, vocabulary, and whether noisy releases have the noise recorded in the ledger.

`releases.safetensors` holds the noisy query results, before anything was computed from them. Each query computes the
exact numbers again, and the difference must be noise of the stated standard deviation (`Query.checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from dpformer.accounting.events import Event
from dpformer.data import Dataset
from dpformer.files import regular
from dpformer.findings import Finding
from dpformer.kinds.ranking import served_ranks
from dpformer.queries.base import Arrays, Inspection
from dpformer.queries.popularity import PopularityQuery
from dpformer.queries.registry import all_queries, asked_queries
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.runs.model_file import sha256_of
from dpformer.runs.releases_file import load_releases
from dpformer.training.plan import Plan
from dpformer.verification.claims import DATA, FILES, MODEL, size_of_noise
from dpformer.verification.released_file import ReleasedFile


class DataCheck:
    """The releases compared with the data. Without `dataset` most checks are reported as not made."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        facts: dict[str, Any],
        plan: Callable[[], Plan],
        events: Callable[[], list[Event]],
        file: ReleasedFile,
        dataset: Dataset | None,
    ) -> None:
        self.folder, self.config, self.facts, self.file, self.dataset = folder, config, facts, file, dataset
        self.seen = Inspection(
            config=config,
            statement=facts,
            plan=plan,
            events=events,
            arrays=lambda: self._arrays,
            vocabulary=lambda: file.vocabulary,
            attributes=file.attributes,
            dataset=dataset,
            ranks=self._ranks,
        )

    def checks(self) -> Iterator[tuple[str, Callable[[], Finding]]]:
        """Each check with the claim that it supports."""
        yield DATA, self.facts_on_the_data
        yield FILES if self.config.kind.trains else MODEL, self.releases
        for query in all_queries():
            for check in query.checks(self.seen):
                yield size_of_noise(query.label), check

    def facts_on_the_data(self) -> Finding:
        name = "facts on the data"
        if self.dataset is None:
            return Finding(name, None, "not compared: the data was not read")
        if self.dataset.num_users != self.facts["users"]:
            return Finding(name, False, f"{self.dataset.num_users:,} users, not {self.facts['users']:,}")
        released, known = [str(item) for item in self.file.release.vocabulary], list(self.dataset.vocabulary.ids)
        if self.config.items_policy == "dp":
            among = set(released)
            same = released == [item for item in known if item in among]
        else:
            same = released == known
        return Finding(name, same, "users and items match the data" if same else "the items are not those of the data")

    def releases(self) -> Finding:
        """The model must follow from the noisy numbers in releases.safetensors, which must be valid query results."""
        name = "releases"
        if not self._due:
            return Finding(name, not self.folder.releases.exists(), "none besides training")
        if "releases" not in self.facts["hashes"]:
            return Finding(name, False, "the statement has no hash of releases.safetensors")
        if self._arrays is None:
            return Finding(name, None, "not compared: releases.safetensors is missing")
        if sha256_of(self.folder.releases) != self.facts["hashes"]["releases"]:
            return Finding(name, False, "releases.safetensors does not match the statement")
        if wrong := self._wrong_arrays(self._arrays):
            return Finding(name, False, wrong)
        return Finding(name, *self._made_of(self._arrays))

    @property
    def _due(self) -> bool:
        """Whether the run asked any query before training."""
        return self.config.private and any(not query.after_training for query in asked_queries(self.config))

    @cached_property
    def _arrays(self) -> Arrays | None:
        return None if regular(self.folder.releases, 2**40) else load_releases(self.folder.releases)

    def _wrong_arrays(self, arrays: Arrays) -> str:
        """Every array must be a valid result of a query of this run."""
        due: set[str] = set()
        for query in asked_queries(self.config):
            if query.after_training:
                continue
            if wrong := query.problem(self.seen, arrays):
                return wrong
            due |= query.arrays(query.restore(arrays, self.config, self.seen.plan()), self.config).keys()
        odd = sorted(arrays.keys() ^ due)
        return f"{odd[0]} is unexpected or missing" if odd else ""

    def _made_of(self, arrays: Arrays) -> tuple[bool | None, str]:
        """Whether the model follows from the releases."""
        popular = (query for query in asked_queries(self.config) if isinstance(query, PopularityQuery))
        query = next(popular, None)
        if query is None:
            return True, "consistent with the config"
        value = query.restore(arrays, self.config, self.seen.plan())
        if not np.array_equal(value.frequencies.p, np.asarray(self.file.release.frequencies)):
            return False, "the frequencies of the model do not follow from the releases"
        return self.config.kind.follows(self.config, value, self.file.release, self.file.attributes())

    def _ranks(self) -> Any:
        assert self.dataset is not None
        return served_ranks(
            self.file.release.model,
            self.dataset,
            vocabulary=self.file.vocabulary,
            filter_seen=self.config.filter_seen,
        )
