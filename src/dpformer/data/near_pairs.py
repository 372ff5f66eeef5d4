"""Pairs of items that share a rare public attribute: a public set, which tells whether attributes say anything.

In each column (and pair of columns) attributes are taken from the rarest on, as long as all pairs of items that share
one of them are at most `PER_ITEM` per item. Everything is a function of the public catalogue, in integers.
"""

import numpy as np

from dpformer.data.attributes import Attributes
from dpformer.engines.cells import cells_below

PER_ITEM = 40  # maximum number of pairs per item that one column adds
MOST_PAIRS = 2**24  # of all columns together: bounds memory


def near_pairs(attributes: Attributes) -> np.ndarray:
    """(K,) int64 ascending: the cells b(b−1)/2 + a of pairs a < b of items that share a rare attribute.

    >>> near_pairs(Attributes.of_items([[("brand", "x")], [("brand", "y")], [("brand", "x")], [("brand", "y")]]))
    array([1, 4])
    """
    attributes = attributes.with_pairs()
    sizes = np.bincount(attributes.links, minlength=len(attributes))
    columns, column_of = np.unique([column for column, _ in attributes.names], return_inverse=True)
    most = min(PER_ITEM * attributes.num_items, MOST_PAIRS // max(len(columns), 1))
    chosen = np.zeros(len(attributes), dtype=bool)
    for column in range(len(columns)):
        inside = np.flatnonzero(column_of == column)
        inside = inside[np.argsort(sizes[inside], kind="stable")]
        chosen[inside[np.cumsum(sizes[inside] * (sizes[inside] - 1) // 2) <= most]] = True
    order = np.argsort(attributes.links, kind="stable")  # the items of each attribute, ascending
    items = attributes.origins[order]
    starts = np.searchsorted(attributes.links[order], np.arange(len(attributes) + 1))
    cells = [np.zeros(0, np.int64)]
    for attribute in np.flatnonzero(chosen).tolist():
        members = items[starts[attribute] : starts[attribute + 1]]
        low, high = np.triu_indices(len(members), 1)
        cells.append(members[high] * (members[high] - 1) // 2 + members[low])
    return np.unique(np.concatenate(cells))


def chance_of(near: np.ndarray, num_items: int) -> float:
    """The probability that two different items, each as likely as any other, are near."""
    return len(near) / max(cells_below(num_items), 1)
