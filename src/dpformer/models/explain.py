"""Why an item is recommended: the parts of its score, which add up to it.

A score of transition counts is ln(Σ_k α_k (T + μK)_{x_k b} + 0.01·q_b): a sum over items of the history, each with what
followed it and what shares its attributes, and a little popularity. The parts here are those terms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike

from dpformer.models.history import latest_items, row_of, weights_of

if TYPE_CHECKING:
    from dpformer.data.attributes import Name
    from dpformer.models.counts import TransitionCounts


@dataclass(frozen=True)
class Part:
    """One reason: an item that this one often follows, an attribute shared with one, or (neither) popularity."""

    item: int | None  # item of the history
    attribute: Name | None
    value: float

    @property
    def kind(self) -> str:
        if self.item is None:
            return "popularity"
        return "transition" if self.attribute is None else "attribute"


@dataclass(frozen=True)
class Explanation:
    """The parts of exp(score), largest first."""

    item: int
    parts: tuple[Part, ...]

    @property
    def total(self) -> float:
        return math.fsum(part.value for part in self.parts)

    @property
    def score(self) -> float:
        """The item's value in `scores`."""
        return math.log(self.total)

    def shares(self) -> list[tuple[Part, float]]:
        """Each part as a share of the total; shares sum to 1."""
        return [(part, part.value / self.total) for part in self.parts]


@torch.no_grad()
def explain(model: TransitionCounts, history: ArrayLike, item: int, hint: float) -> Explanation:
    """The parts of the score of one item after one history."""
    if not 0 <= item < model.num_items:
        raise ValueError(f"item {item} is outside the vocabulary 0 … {model.num_items - 1}; map ids first")
    latest = torch.from_numpy(latest_items([history], model.num_items))
    alphas = weights_of(torch.arange(latest.shape[1]), latest >= 0, model.harmonic)[0].tolist()
    values: dict[tuple[int | None, int | None], float] = defaultdict(float)
    shared = _pulls(model, item)
    reach = model._reach().double().tolist() if shared else []
    for origin, alpha in zip(latest[0].tolist(), alphas, strict=True):
        if origin < 0:
            continue
        start, stop = model.offsets[origin : origin + 2].tolist()
        place = np.flatnonzero(model.targets[start:stop].numpy() == item)
        if len(place):
            values[origin, None] += alpha * float(model.chances[start + int(place[0])])
        for link in range(*model.attribute_offsets[origin : origin + 2].tolist()) if shared else ():
            attribute = int(model.attribute_links[link])
            if attribute in shared:
                values[origin, attribute] += float(model.backoff) * alpha * reach[link] * shared[attribute]
    values[None, None] = hint * float(model.popularity[item])
    parts = [
        Part(origin, None if attribute is None else model.attribute_names[attribute], value)
        for (origin, attribute), value in values.items()
    ]
    return Explanation(item, tuple(sorted(parts, key=lambda part: -part.value)))


def _pulls(model: TransitionCounts, item: int) -> dict[int, float]:
    """P_gb of the attributes g of item b."""
    if not model.num_attributes:
        return {}
    here = row_of(model.attribute_offsets) == item
    return dict(zip(model.attribute_links[here].tolist(), model._pulled()[here].double().tolist(), strict=True))
