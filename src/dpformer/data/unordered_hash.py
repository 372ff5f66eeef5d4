"""A hash of all histories that does not depend on the order of users, as a cluster can compute it, too.

The SHA-256 of each history is cut into parts of 52 bits, and each part is added up over all users. Private.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from dpformer.data.vocabulary import Vocabulary

DIGITS = 13  # hexadecimal, of a part: sums of so many bits are exact everywhere
PARTS_OF_A_DIGEST = range(0, 64, DIGITS)


def unordered_hash(items: np.ndarray, offsets: np.ndarray, vocabulary: Vocabulary, users: int, validation: bool) -> str:
    """Of histories in arrays, user u's items at items[offsets[u]:offsets[u + 1]]."""
    totals = [0] * len(PARTS_OF_A_DIGEST)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if start < stop:
            text = ",".join(map(str, items[start:stop].tolist()))
            digest = hashlib.sha256(text.encode()).hexdigest()
            for part, at in enumerate(PARTS_OF_A_DIGEST):
                totals[part] += int(digest[at : at + DIGITS], 16)
    return hash_of_digests(totals, vocabulary, users, validation)


def hash_of_digests(totals: Sequence[int], vocabulary: Vocabulary, users: int, validation: bool) -> str:
    """Of the sums of the parts of all digests."""
    head = f"dpformer cluster 1\n{int(validation)} {users} {len(vocabulary)}\n{' '.join(map(str, totals))}\n"
    digest = hashlib.sha256(head.encode())
    names: Iterable[str] = vocabulary.ids
    for name in names:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
