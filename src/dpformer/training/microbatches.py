"""Micro-batches: the users of a logical batch, sorted by length and cut where a limit of positions is reached.

A cut never changes what is computed, since `p.grad` is a sum over users: it only bounds memory. Sorted, rows of a
micro-batch have nearly the same length, and little is spent on padding.
"""

import numpy as np

from dpformer.clipping import norms, softmax_head

FEW = 1024  # positions: with fewer at once, the overhead of a micro-batch costs more than computing logits again


def by_length(users: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The users, the longest first (so that memory runs out at once or never), ties in the order given."""
    return users[np.argsort(-lengths[users], kind="stable")]


def cut(lengths: np.ndarray, tokens: int, *, apart: bool = False) -> list[slice]:
    """Slices of rows, given their lengths in falling order: rows × longest row ≤ `tokens`, or one row.

    With `apart`, rows of unequal length are never together: then no row is padded further because of another.

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
    """Positions of a micro-batch: at most `most`, and so few that what the engine would like to keep can be kept.

    That is the residuals of the softmax over `items` (where that would leave too few, they are computed again), and
    the gradients of users, `encoder` numbers each, in all but the table of items.
    """
    kept = softmax_head.KEEP // items
    users = norms.KEEP // max(1, encoder)
    return min(most, kept if kept >= FEW else most, max(FEW, users * max_length))
