"""Queries for the popularity of items: each returns `Popularity`, and a run asks at most one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dpformer.accounting.events import Event, Gaussian
from dpformer.errors import DpformerError
from dpformer.findings import Finding
from dpformer.noise.randomness import public_grid
from dpformer.queries.base import ALARM, Arrays, Inspection, Query
from dpformer.queries.frequencies import FrequencyRelease, estimate, user_counts
from dpformer.queries.items import MOST_ITEMS, exact_popularity, passed_noise, threshold_for

if TYPE_CHECKING:
    from dpformer.runs.config import Config
    from dpformer.training.plan import Plan

LIST_DELTA = 0.1  # share of δ for the threshold of a released item list
FEWEST_ITEMS = 2


@dataclass(frozen=True)
class Popularity:
    """The popularity of items, and the item list. Transition counts provide both too (`TransitionRelease`)."""

    frequencies: FrequencyRelease
    item_list: np.ndarray | None = None  # (M,) int64: released items, by their numbers in the data; None: all


class PopularityQuery(Query):
    """What the three queries have in common. A value has `frequencies` and `item_list`."""

    def deviation(self, config: Config, event: Event, *, twice: bool = False) -> float:
        """The standard deviation of the noise on one item; with `twice`, that of the mean of two releases."""
        return event.noise_multiplier

    def failure(self, config: Config) -> float:
        """The δ of the threshold of a released item list; 0 if the list is public."""
        assert config.delta is not None
        return LIST_DELTA * config.delta if config.items_policy == "dp" else 0.0

    def list_price(self, config: Config, event: Event) -> dict[str, Any] | None:
        """Noise, threshold and δ of a released item list; None if it is public."""
        if config.items_policy != "dp":
            return None
        noise = self.deviation(config, event)
        threshold = threshold_for(event.failure, noise)
        return {"noise_multiplier": noise, "delta": event.failure, "threshold": threshold, "max_items": MOST_ITEMS}

    def refuse_short_list(self, value: Any, config: Config, event: Event) -> None:
        """Refuse a list with fewer than the two items that a model needs."""
        price, listed = self.list_price(config, event), value.item_list
        if price is not None and listed is not None and len(listed) < FEWEST_ITEMS:
            raise DpformerError(
                f"{len(listed)} of the items are frequent enough to be released (threshold {price['threshold']:.1f} at "
                f"noise of standard deviation {price['noise_multiplier']:.3g}): give a public --catalog, more data, or "
                "a larger --epsilon"
            )

    # Kept.

    def arrays(self, value: Any, config: Config) -> dict[str, np.ndarray]:
        return {"popularity": value.frequencies.counts}

    def array_kinds(self, name: str) -> tuple[type, int] | None:
        return (np.float64, 1) if name == "popularity" else None

    def private_arrays(self, value: Any) -> dict[str, np.ndarray]:
        return {} if value.item_list is None else {"item_list": value.item_list}

    def restore(self, arrays: Arrays, config: Config, plan: Plan) -> Any:
        """The counts determine everything: which items are distinguishable from zero, and how frequent they are."""
        if "popularity" not in arrays:
            raise ValueError("the popularity of items is missing")
        frequencies = self.restored_frequencies(arrays["popularity"], config, plan)
        return Popularity(frequencies, arrays.get("item_list"))

    def restored_frequencies(
        self, counts: np.ndarray, config: Config, plan: Plan, *, twice: bool = False
    ) -> FrequencyRelease:
        """Frequencies from noisy counts, by the rule of the release."""
        event = next(event for event in plan.events if event.label == self.label)
        assert isinstance(event, Gaussian)
        noise = self.deviation(config, event, twice=twice)
        p, detected = estimate(counts, noise, plan.users)
        return FrequencyRelease(p, counts, detected, replace(event, noise_multiplier=noise), plan.users)

    def parts(self, value: Any) -> list[np.ndarray]:
        """Popularity as released, in one or several parts."""
        return [value.frequencies.counts]

    # Verified.

    def problem(self, seen: Inspection, arrays: Arrays) -> str:
        value = self.restore(arrays, seen.config, seen.plan())
        grid = public_grid(self.deviation(seen.config, self._event(seen)))
        if any((part / grid % 1).any() for part in self.parts(value)):
            return "popularity is not on the grid of its noise, so no release produced it"
        return ""

    def checks(self, seen: Inspection) -> Iterator[Callable[[], Finding]]:
        if self.asked(seen.config) and seen.config.private:
            yield lambda: self.noise_of_popularity(seen)

    def noise_of_popularity(self, seen: Inspection) -> Finding:
        """The difference to exact counts must be noise of the stated standard deviation.

        If only counts above a threshold τ were released, noise is normal *given* that it exceeded τ, so u_i =
        Q((c_i − x_i)/z) / Q((τ − x_i)/z) is uniform, for every item; Σ Φ⁻¹(u_i)² is χ².
        """
        from scipy import stats

        name, arrays = "noise of popularity", seen.arrays()
        if seen.dataset is None or arrays is None:
            return Finding(name, None, "not checked: the data was not read")
        value = self.restore(arrays, seen.config, seen.plan())
        exact, threshold = self._exact_counts(seen, value)
        if len(exact) != len(value.frequencies.counts):
            return Finding(name, False, "an item was released that does not occur in training")
        once, parts, count = self.deviation(seen.config, self._event(seen)), self.parts(value), len(exact)
        squares = [float(np.square(passed_noise(part, exact, once, threshold)).sum()) for part in parts]
        p = min(2 * len(parts) * min(stats.chi2.cdf(x, count), stats.chi2.sf(x, count)) for x in squares)
        found = " and ".join(f"{math.sqrt(x / max(count, 1)):.3f}" for x in squares)
        said = f"its standard deviation is {found} times that in the ledger, over {count:,} items"
        return Finding(name, bool(p >= ALARM), said)

    def _exact_counts(self, seen: Inspection, value: Any) -> tuple[np.ndarray, float]:
        """The exact counts of the released items, and the threshold that their noisy counts exceeded."""
        dataset = seen.dataset
        assert dataset is not None
        items, offsets = dataset.packed_train()
        price = self.list_price(seen.config, self._event(seen))
        if price is None:
            users = np.repeat(np.arange(dataset.num_users), np.diff(offsets))
            return user_counts(users, items, dataset.num_users, dataset.num_items), -math.inf
        exact, numbers = exact_popularity(items, offsets), seen.vocabulary().match(list(dataset.vocabulary.ids))
        twice = len(self.parts(value)) > 1
        grid = public_grid(self.deviation(seen.config, self._event(seen), twice=twice))
        # The smallest number that passes, minus half a grid step.
        return exact[np.flatnonzero(numbers[: len(exact)] >= 0)], price["threshold"] + 1.5 * grid

    def _event(self, seen: Inspection) -> Event:
        return next(event for event in seen.plan().events if event.label == self.label)


def popularity_event(events: Iterable[Event]) -> tuple[PopularityQuery, Event] | None:
    """The query among some events that released popularity, and its event; None if there is none."""
    from dpformer.queries.registry import query_of

    found = ((query_of(event.label), event) for event in events)
    return next(((query, event) for query, event in found if isinstance(query, PopularityQuery)), None)


def list_price(config: Config, plan: Plan) -> dict[str, Any] | None:
    """Noise, threshold and δ of a run's released item list; None if it was not released from the data."""
    found = popularity_event(plan.events)
    return None if found is None else found[0].list_price(config, found[1])
