"""The queries for a released item list, and for the popularity of a public one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpformer.accounting.events import Event, Gaussian
from dpformer.noise.randomness import SecureRandom
from dpformer.queries.base import Answer, Canaries, Question
from dpformer.queries.frequencies import LABEL as FREQUENCIES_LABEL
from dpformer.queries.frequencies import exact_frequencies, of_items, release_frequencies
from dpformer.queries.items import LABEL as LIST_LABEL
from dpformer.queries.items import alone_of, lonely, release_items, threshold_for
from dpformer.queries.own_cells import OwnCells
from dpformer.queries.popularity import Popularity, PopularityQuery

if TYPE_CHECKING:
    from dpformer.runs.config import Config

CANARY_DELTA = 1e-6  # δ of the threshold when auditing a list without a claim
LOUD = 50  # repetitions of an item in an audit canary's history, which count once


class ItemsQuery(PopularityQuery):
    """The item list with its popularity, if there is no public one and transition counts do not provide it."""

    label = LIST_LABEL
    sentence = "which items there are and how popular they are"
    share_option = "items_share"

    def asked(self, config: Config) -> bool:
        from dpformer.queries.transitions.query import TRANSITIONS

        return config.items_policy == "dp" and not TRANSITIONS.asked(config)

    def run(self, question: Question, event: Event, random: SecureRandom) -> Answer:
        items, offsets = question.dataset.packed_train()
        found = release_items(items, offsets, event.noise_multiplier, delta=event.failure, random=random)
        value = Popularity(of_items(found, question.dataset.num_users), found.items)
        self.refuse_short_list(value, question.config, event)
        return Answer(value, found.event)

    def canaries(self, event: Gaussian, member: np.ndarray, seed: int | None = None) -> Canaries:
        """Canary j has one or many items, which enough other users also have to exceed the threshold.

        In addition there are users whose items no one else has: those must not be released.
        """
        sigma, delta = event.noise_multiplier, event.failure or CANARY_DELTA
        owned, random = OwnCells.of(len(member)), SecureRandom(self.label, seed=seed)
        known = math.ceil(threshold_for(delta, sigma) + 8 * sigma) + 1
        histories = [*owned.histories(member), *lonely(owned.total)]
        lengths = np.concatenate([np.ones(known * owned.total, np.int64), [len(items) for items in histories]])
        items = np.concatenate([np.tile(np.arange(owned.total), known), *histories])
        found = release_items(items, np.append(0, np.cumsum(lengths)), sigma, delta=delta, random=random)
        if not np.array_equal(found.items[: owned.total], np.arange(owned.total)):
            raise ArithmeticError("an item of many users was not released: the threshold is wrong")
        seen = owned.canaries(found.counts[: owned.total] - known, sigma, member)
        return replace(seen, alone=alone_of(found.items, owned.total, delta))


ITEMS = ItemsQuery()


class FrequenciesQuery(PopularityQuery):
    """The popularity of the items of a public list, if the model needs it and no other query provides it."""

    label = FREQUENCIES_LABEL
    sentence = "how popular items are"
    share_option = "frequency_share"

    def asked(self, config: Config) -> bool:
        from dpformer.queries.transitions.query import TRANSITIONS

        return config.needs_frequencies and not ITEMS.asked(config) and not TRANSITIONS.asked(config)

    def failure(self, config: Config) -> float:
        return 0.0  # the list is public

    def run(self, question: Question, event: Event, random: SecureRandom) -> Answer:
        items, offsets = question.dataset.packed_train()
        found = release_frequencies(
            items, question.dataset.num_items, event.noise_multiplier, offsets=offsets, random=random
        )
        return Answer(Popularity(found), found.event)

    def exact(self, question: Question) -> Popularity:
        return Popularity(exact_frequencies(question.dataset))

    def canaries(self, event: Gaussian, member: np.ndarray, seed: int | None = None) -> Canaries:
        """Canary j has items that no one else has, repeatedly: one, or many for every second canary."""
        owned = OwnCells.of(len(member))
        histories = [np.tile(cells, LOUD) for cells in owned.histories(member)]
        seen = release_frequencies(histories, owned.total, event.noise_multiplier, seed=seed).counts
        return owned.canaries(seen, event.noise_multiplier, member)


FREQUENCIES = FrequenciesQuery()
