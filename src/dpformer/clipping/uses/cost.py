"""What the norms of a parameter cost either way, in multiply-adds a user: inner products, or gradients written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from dpformer.clipping.uses.dense import Dense
from dpformer.clipping.uses.lookup import Lookup
from dpformer.clipping.uses.outer import Outer
from dpformer.clipping.uses.pairs import Use
from dpformer.clipping.uses.ragged import Ragged

PASSES = 16.0  # multiply-adds in the time in which a number goes to memory and back


def gram_cost(uses: Sequence[Use]) -> float:
    """Multiply-adds a user of all the inner products, or infinity where one has no closed form."""
    if not closed_form(uses):
        return float("inf")
    return sum(_pair_cost(one, other) for i, one in enumerate(uses) for other in uses[i:])


def closed_form(uses: Sequence[Use]) -> bool:
    """Whether all inner products have one. What is written out already is simply added to the others."""
    return not any(isinstance(use, Dense) for use in uses) and sum(isinstance(use, Ragged) for use in uses) <= 1


def _pair_cost(one: Use, other: Use) -> float:
    if isinstance(one, Lookup):
        one, other = other, one
    return _PAIR_COSTS[isinstance(one, Lookup), isinstance(other, Lookup)](one, other)


def _outer_outer(one: Outer | Ragged, other: Outer | Ragged) -> float:
    return rows_each(one) * rows_each(other) * float(one.left.shape[-1] + one.right.shape[-1])


def _outer_lookup(one: Outer | Ragged, other: Lookup) -> float:
    return rows_each(one) * other.ids.shape[1] * (other.grad.shape[2] + 4.0)


def _lookup_lookup(one: Lookup, other: Lookup) -> float:
    return 8.0 * one.grad.shape[1] * one.grad.shape[2]


_PAIR_COSTS: dict[tuple[bool, bool], Callable[[Any, Any], float]] = {  # is the first, the second a look-up?
    (False, False): _outer_outer,
    (False, True): _outer_lookup,
    (True, True): _lookup_lookup,
}


def dense_cost(uses: Sequence[Use], kept: bool) -> float:
    """Multiply-adds a user of writing the gradient out, beyond what the inner products need as well: the clipped sum.

    What is written out and kept makes the sum too, so then its product is not counted; a number that is written and
    read back counts as several multiply-adds.
    """
    numbers = prod(uses[0].shape)
    cost = PASSES * numbers
    for use in uses:
        if isinstance(use, (Outer, Ragged)) and not kept:
            cost += rows_each(use) * numbers
        elif isinstance(use, Lookup):
            cost += 4.0 * use.grad.shape[1] * use.grad.shape[2]
    return cost


def rows_each(use: Outer | Ragged) -> float:
    """Rows of a user, on average."""
    if isinstance(use, Outer):
        return float(use.left.shape[1])
    return len(use.left) / max(1, len(use.counts))
