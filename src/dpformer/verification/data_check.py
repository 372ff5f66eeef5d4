"""With the data at hand: users, vocabulary, and whether what was released with noise has the noise of the ledger.

`releases.safetensors` holds the noisy numbers as they came out of the mechanism, before anything was made of them. Of
each the exact number is counted again here, and the difference must be noise of the stated deviation:

- *Popularity.* c_i = x_i + z·N(0, 1). Where only counts above a threshold τ were released, noise is normal *given* that
  it passed, so u_i = Q((c_i − x_i)/z) / Q((τ − x_i)/z) is uniform, for every item; Σ Φ⁻¹(u_i)² is χ².
- *Transitions*, round by round (rounds.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.accounting.events import Gaussian
from dpformer.data import Dataset
from dpformer.data.attributes import Attributes
from dpformer.engines.sums import ArraySums
from dpformer.files import regular
from dpformer.models.counts import TransitionCounts
from dpformer.noise.randomness import public_grid
from dpformer.queries.counts import LABEL as COUNTS
from dpformer.queries.counts import (
    ROUNDS,
    TransitionRelease,
    again_wanted,
    final_deviations,
    noise_of_pairs,
    round_of_items,
)
from dpformer.queries.frequencies import LABEL as FREQUENCIES
from dpformer.queries.frequencies import FrequencyRelease, estimate, user_counts
from dpformer.queries.items import exact_popularity, passed_noise
from dpformer.queries.metrics import ALARM
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.runs.model_file import sha256_of
from dpformer.runs.releases_file import RawReleases, load_releases
from dpformer.statement.public_facts import list_price, popularity_noise
from dpformer.training.plan import Plan
from dpformer.verification.findings import Finding
from dpformer.verification.released_file import ReleasedFile
from dpformer.verification.rounds import wrong_with_rounds


class DataCheck:
    """What was released, against the data. Without `dataset` most of it is not checked, and says so."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        facts: dict[str, Any],
        plan: Callable[[], Plan],
        file: ReleasedFile,
        dataset: Dataset | None,
    ) -> None:
        self.folder, self.config, self.facts, self.plan, self.file = folder, config, facts, plan, file
        self.dataset = dataset

    def checks(self) -> Iterator[Callable[[], Finding]]:
        yield self.facts_on_the_data
        yield self.releases
        yield self.noise_of_popularity
        yield self.noise_of_transitions

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
        return Finding(name, same, "users and items are those of the data" if same else "the items are not of the data")

    # Releases as they came out, and the model that is made of them.

    @cached_property
    def _raw(self) -> RawReleases | None:
        return None if regular(self.folder.releases, 2**40) else load_releases(self.folder.releases)

    @property
    def _due(self) -> bool:
        """Whether the run released popularity at all."""
        return self.config.private and self.file.release.frequencies is not None

    @property
    def _deviation(self) -> float:
        return popularity_noise(self.config, self.plan(), again=self._again)

    @property
    def _again(self) -> bool:
        """Whether popularity is the mean of two releases."""
        return self._raw is not None and self._raw.again is not None

    def _right_number(self, raw: RawReleases) -> bool:
        """Popularity was released again where the rule says so, and nowhere else."""
        described = self.config.model == "counts" and bool(self.config.attributes)
        due = described and self.config.items_policy != "dp" and again_wanted(raw.parts()[0], self.facts["users"])
        return due == self._again

    def releases(self) -> Finding:
        """The model is made of the noisy numbers in releases.safetensors, and these are on the grid of their noise."""
        name = "releases"
        if not self._due:
            return Finding(name, not self.folder.releases.exists(), "none besides training")
        if "releases" not in self.facts["hashes"]:
            return Finding(name, False, "the statement has no hash of releases.safetensors")
        if self._raw is None:
            return Finding(name, None, "not compared: releases.safetensors is not here")
        if sha256_of(self.folder.releases) != self.facts["hashes"]["releases"]:
            return Finding(name, False, "releases.safetensors is not the file of the statement")
        grid = public_grid(popularity_noise(self.config, self.plan()))
        if any((part / grid % 1).any() for part in self._raw.parts()):
            return Finding(name, False, "popularity is not on the grid of its noise: nothing was released that way")
        if not self._right_number(self._raw):
            return Finding(name, False, "popularity was released twice or once, against the rule")
        p, _ = estimate(self._raw.popularity, self._deviation, self.facts["users"])
        if not np.array_equal(p, np.asarray(self.file.release.frequencies)):
            return Finding(name, False, "the frequencies of the model do not follow from what was released")
        if self.config.model != "counts":
            return Finding(name, True, "the model is made of them")
        attributes, used = self.file.attributes(), int(getattr(self.file.release.model, "num_attributes", 0))
        if attributes is None and used:
            said = "frequencies follow from them; not checked: counts back off to attributes of a catalogue (--catalog)"
            return Finding(name, None, said)
        if not self._model_follows(attributes):
            return Finding(name, False, "the counts of the model do not follow from what was released")
        return Finding(name, True, "the model is made of them")

    def _model_follows(self, attributes: Attributes | None) -> bool:
        release = self._transitions()
        if release is None:
            return False
        again, found = TransitionCounts.from_release(release, attributes), self.file.release.model
        names = getattr(found, "attribute_names", [])
        if again.arguments != found.arguments or list(map(tuple, again.attribute_names)) != list(map(tuple, names)):
            return False
        return all(_equal(value, found.state_dict()[name]) for name, value in again.state_dict().items())

    def _transitions(self) -> TransitionRelease | None:
        """The release again: its deviations follow from σ."""
        raw, event = self._raw, next((event for event in self.plan().events if event.label == COUNTS), None)
        if raw is None or raw.items is None or raw.pairs is None or raw.total is None or raw.difference is None:
            return None
        assert isinstance(event, Gaussian)
        total, difference = final_deviations(
            event.noise_multiplier, listed=self.config.items_policy == "dp", again=self._again
        )
        p, detected = estimate(raw.popularity, self._deviation, self.facts["users"])
        popularity = Gaussian(self._deviation, label=FREQUENCIES)
        frequencies = FrequencyRelease(p, raw.popularity, detected, popularity, self.facts["users"])
        return TransitionRelease(raw.items, raw.pairs, raw.total, total, raw.difference, difference, frequencies, event)

    # Noise.

    def noise_of_popularity(self) -> Finding:
        from scipy import stats

        name = "noise of popularity"
        if not self._due:
            return Finding(name, True, "none released")
        if self.dataset is None or self._raw is None:
            return Finding(name, None, "not checked: the data was not read")
        items, offsets = self.dataset.packed_train()
        threshold = -math.inf
        if self.config.items_policy == "dp":
            exact = exact_popularity(items, offsets)
            price = list_price(self.config, self.plan())
            assert price is not None
            threshold = price["threshold"] + 1.5 * public_grid(self._deviation)  # the least number that passes, less ½
            numbers = self.file.vocabulary.match(list(self.dataset.vocabulary.ids))
            exact = exact[np.flatnonzero(numbers[: len(exact)] >= 0)]
        else:
            users = np.repeat(np.arange(self.dataset.num_users), np.diff(offsets))
            exact = user_counts(users, items, self.dataset.num_users, self.dataset.num_items)
        if len(exact) != len(self._raw.popularity):
            return Finding(name, False, "an item was released that nobody trains on")
        once = popularity_noise(self.config, self.plan())
        parts, count = self._raw.parts(), len(exact)
        squares = [float(np.square(passed_noise(part, exact, once, threshold)).sum()) for part in parts]
        p = min(2 * len(parts) * min(stats.chi2.cdf(x, count), stats.chi2.sf(x, count)) for x in squares)
        seen = " and ".join(f"{math.sqrt(x / max(count, 1)):.3f}" for x in squares)
        return Finding(name, bool(p >= ALARM), f"its deviation is {seen} of what the ledger says, over {count:,} items")

    def noise_of_transitions(self) -> Finding:
        name = "noise of transitions"
        if self.config.model != "counts":
            said = "not checked: the network has been trained since" if self.config.warm_start else "none released"
            return Finding(name, None if self.config.warm_start else True, said)
        release, raw = self._transitions(), self._raw
        if self.dataset is None or release is None or raw is None or not self.config.private:
            return Finding(name, None, "not checked: the data was not read, or there is no noise")
        assert release.event is not None
        items, offsets = self.dataset.packed_train()
        placed = np.full(len(release.frequencies.p) + 1, -1)  # the last place is that of items that were not released
        placed[release.items] = np.arange(len(release.items))
        places = placed[self.file.vocabulary.match(list(self.dataset.vocabulary.ids))]
        first = round_of_items(listed=self.config.items_policy == "dp", again=self._again)
        sigma = noise_of_pairs(first, release.event.noise_multiplier)
        wrong = wrong_with_rounds(raw, ArraySums.packed(items, offsets), places, sigma)
        if wrong:
            return Finding(name, False, wrong)
        kept, rounds = {one.number for one in raw.rounds}, range(len(ROUNDS))
        missing = ", ".join(str(number + 1) for number in rounds if number not in kept)
        if missing:
            return Finding(name, None, f"there in the other rounds; not checked: rounds of too many pairs ({missing})")
        return Finding(name, True, f"there in all {len(ROUNDS)} rounds, from which the counts follow")


def _equal(made: Tensor, found: Tensor) -> bool:
    """The same; numbers that back-off makes by sums of any order, to rounding."""
    if not made.is_floating_point():
        return torch.equal(made, found)
    return made.shape == found.shape and bool(torch.isclose(made, found, rtol=1e-5, atol=0).all())
