"""A hash of all histories that does not depend on the order of users, as a cluster can compute it, too. Private."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from dpformer.data.vocabulary import Vocabulary


def unordered_hash(totals: Sequence[int], vocabulary: Vocabulary, users: int, validation: bool) -> str:
    """Of `digest_sums` of all histories."""
    head = f"dpformer cluster 1\n{int(validation)} {users} {len(vocabulary)}\n{' '.join(map(str, totals))}\n"
    digest = hashlib.sha256(head.encode())
    names: Iterable[str] = vocabulary.ids
    for name in names:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
