"""Digests of histories that add up in any order, in any place."""

import hashlib

import numpy as np

_DIGITS = 13  # hexadecimal, of a part: sums of 52 bits
_PARTS = range(0, 64, _DIGITS)


def digest_sums(items: np.ndarray, offsets: np.ndarray) -> list[int]:
    """The SHA-256 of each history, items[offsets[u]:offsets[u + 1]], cut into parts, and each part added up."""
    totals = [0] * len(_PARTS)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if start < stop:
            digest = hashlib.sha256(",".join(map(str, items[start:stop].tolist())).encode()).hexdigest()
            for part, at in enumerate(_PARTS):
                totals[part] += int(digest[at : at + _DIGITS], 16)
    return totals
