"""Public vectors of items (of texts, images, products) as attributes: which items are near which.

An item with a vector is an attribute, of itself and of the `NEIGHBOURS` items whose vectors have the largest cosine
with its own. So items near one another share many attributes, and what is known about attributes (weights, evidence,
explanations) applies to vectors. Vectors are scaled to integers first, whose products are exact: the same catalogue
gives the same attributes everywhere.
"""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from dpformer.data.attributes import NEAR_BY, Name
from dpformer.errors import DpformerError

NEIGHBOURS = 20
SHORTEST = 4  # numbers in a vector; shorter lists of numbers are values
MOST_ITEMS = 2**17  # all pairs of items are compared
SCALE = 2**12  # of the largest entry of a vector
AT_ONCE = 2**24  # cosines at a time


def vectors_of(fields: Sequence[Any]) -> np.ndarray | None:
    """(items, d) if the fields of a column are vectors, NaN where missing; otherwise None.

    They are vectors if all are lists of the same number of numbers, at least four, and not all numbers are integers.
    """
    known = [field for field in fields if field is not None]
    if not known or not all(isinstance(field, list | tuple) and len(field) >= SHORTEST for field in known):
        return None
    size = len(known[0])
    if not all(len(field) == size and all(isinstance(x, Real) for x in field) for field in known):
        return None
    found = np.array([[np.nan] * size if field is None else field for field in fields], dtype=np.float64)
    there = np.array([field is not None for field in fields])
    whole = (found[there] == np.floor(found[there])).all()
    return None if whole else found


def near_by(column: str, vectors: np.ndarray, ids: Sequence[str]) -> list[list[Name]]:
    """The attributes of each item: the ids of items to which it is near by this column."""
    known = np.flatnonzero(~np.isnan(vectors).all(1))
    if len(known) > MOST_ITEMS:
        raise DpformerError(
            f"column {column!r} has vectors of {len(known):,} items, more than {MOST_ITEMS:,}: give their groups (of a "
            "clustering, say) as a column instead"
        )
    finite = np.isfinite(vectors[known]).all(1)
    if not finite.all():
        wrong = ids[known[np.flatnonzero(~finite)[0]]]
        raise DpformerError(f"the vector of item {wrong!r} in column {column!r} has a value that is not finite")
    largest = np.abs(vectors[known]).max(1, initial=0)
    known = known[largest > 0]
    whole = np.rint(vectors[known] / largest[largest > 0, None] * SCALE)
    facts: list[list[Name]] = [[] for _ in ids]
    for anchor, members in zip(known.tolist(), _nearest(whole), strict=True):
        for member in (anchor, *known[members].tolist()):
            facts[member].append((f"{NEAR_BY}{column}", ids[anchor]))
    return facts


def _nearest(whole: np.ndarray) -> list[np.ndarray]:
    """The rows nearest to each row but itself; of equally near ones the first."""
    lengths = np.sqrt(np.square(whole).sum(1))
    found, step = [], max(1, AT_ONCE // max(len(whole), 1))
    for start in range(0, len(whole), step):
        cosines = whole[start : start + step] @ whole.T / lengths
        rows = np.arange(len(cosines))
        cosines[rows, start + rows] = -np.inf
        few = min(NEIGHBOURS, len(whole) - 1)
        for row in cosines if few else np.zeros((len(cosines), 0)):
            least = np.partition(row, len(row) - few)[len(row) - few] if few else np.inf
            near = np.flatnonzero(row >= least)
            found.append(near[np.argsort(-row[near], kind="stable")[:few]])
    return found
