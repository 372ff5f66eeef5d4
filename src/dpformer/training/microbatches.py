"""Micro-batches: the users of a logical batch, sorted by length and split at a limit of positions.

Splitting never changes the result, since `p.grad` is a sum over users: it only bounds memory. In sorted order, rows of
a micro-batch have similar lengths, so little is spent on padding.
"""

import numpy as np

from dpformer.clipping import parameter_norms
from dpformer.models import softmax_head

FEW = 1024  # positions: below this, the overhead of a micro-batch exceeds the cost of recomputing logits


def by_length(users: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The users, longest first (so that memory runs out immediately or never), ties in the given order."""
    return users[np.argsort(-lengths[users], kind="stable")]


def cut(lengths: np.ndarray, tokens: int, *, apart: bool = False) -> list[slice]:
    """Slices of rows, given their lengths in descending order: rows × longest row ≤ `tokens`, or one row.

    With `apart`, rows of different length are never combined, so that no row is padded because of another.

    >>> cut(np.array([5, 4, 2, 1, 1, 0]), 8)
    [slice(0, 1, None), slice(1, 3, None), slice(3, 6, None)]
    >>> cut(np.array([5, 4, 4, 4, 1, 1]), 8, apart=True)
    [slice(0, 1, None), slice(1, 3, None), slice(3, 4, None), slice(4, 6, None)]
    """
    slices = []
    start = 0
    while start < len(lengths):
        longest = max(1, int(lengths[start]))
        stop = min(len(lengths), start + max(1, tokens // longest))
        if apart:
            stop = start + int((lengths[start:stop] == lengths[start]).sum())
        slices.append(slice(start, stop))
        start = stop
    return slices


def positions_at_once(most: int, items: int, encoder: int, max_length: int) -> int:
    """Positions of a micro-batch: at most `most`, limited so that the engine can keep its intermediate results.

    These are the residuals of the softmax over `items` (recomputed if that would leave too few positions), and the
    gradients of users, `encoder` numbers each, for everything but the item table.
    """
    kept = softmax_head.KEEP // items
    users = parameter_norms.KEEP // max(1, encoder)
    return min(most, kept if kept >= FEW else most, max(FEW, users * max_length))
