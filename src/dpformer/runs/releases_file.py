"""`releases.safetensors`: the noisy numbers as they came out of the mechanisms, before anything was made of them.

They are covered by the guarantee like the model, which is made of them. Whoever has the data can count again and see
that the noise is there (`verify`); nothing else reads the file, and it need not be published.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from dpformer.errors import DpformerError
from dpformer.files import replacing
from dpformer.queries.counts import ROUNDS, RoundRelease, TransitionRelease
from dpformer.queries.frequencies import FrequencyRelease

AGAIN = {"again": np.float64}  # popularity, where it was released twice
KINDS = {"popularity": np.float64, "items": np.int64, "pairs": np.int64, "total": np.float64, "difference": np.float64}
PARTS = {"cells": np.int64, "noisy": np.float64}  # of a round
ROUND = re.compile(f"(?P<part>{'|'.join(PARTS)}) (?P<number>[0-{len(ROUNDS) - 1}])")


@dataclass(frozen=True)
class RawReleases:
    """Noisy counts of popularity (M,), the mean of two releases where `again` has the second one by itself; and of
    transitions what `TransitionRelease` has under the same names."""

    popularity: np.ndarray
    items: np.ndarray | None = None
    pairs: np.ndarray | None = None
    total: np.ndarray | None = None
    difference: np.ndarray | None = None
    rounds: tuple[RoundRelease, ...] = ()
    again: np.ndarray | None = None

    def parts(self) -> list[np.ndarray]:
        """Popularity as it was released, once or twice."""
        return [self.popularity] if self.again is None else [2 * self.popularity - self.again, self.again]


def save_releases(path: Path, frequencies: FrequencyRelease, transitions: TransitionRelease | None = None) -> None:
    """Writes what was released, whole or not at all."""
    arrays = {"popularity": frequencies.counts}
    if transitions is not None:
        arrays |= {name: getattr(transitions, name) for name in ("items", "pairs", "total", "difference")}
        arrays |= {} if transitions.again is None else {"again": transitions.again}
        arrays |= {f"{part} {one.number}": getattr(one, part) for one in transitions.rounds for part in PARTS}
    with replacing(path) as part:
        part.write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def load_releases(path: Path) -> RawReleases:
    """Reads it again; anything else is refused in one sentence."""
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DpformerError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    rounds = {name: found for name in arrays if (found := ROUND.fullmatch(name)) is not None}
    if set(arrays) - set(rounds) not in ({"popularity"}, set(KINDS), {*KINDS, *AGAIN}):
        raise DpformerError(f"{path} holds {', '.join(sorted(arrays))[:200]}, which is not what a run releases")
    for name, array in arrays.items():
        kind = PARTS[rounds[name]["part"]] if name in rounds else (KINDS | AGAIN)[name]
        if array.dtype != kind or array.ndim != 1 + (name == "pairs") or not np.isfinite(array).all():
            raise DpformerError(f"{path}: {name} is not a table of finite {kind.__name__}")
    numbers = sorted({int(found["number"]) for found in rounds.values()})
    if len(rounds) != len(PARTS) * len(numbers) or (numbers and "pairs" not in arrays):
        raise DpformerError(f"{path}: a round lacks its cells or its numbers")
    whole = {name: array for name, array in arrays.items() if name not in rounds}
    each = tuple(RoundRelease(n, arrays[f"cells {n}"], arrays[f"noisy {n}"]) for n in numbers)
    releases = RawReleases(**whole, rounds=each)
    _check(path, releases)
    return releases


def _check(path: Path, found: RawReleases) -> None:
    """Numbers of items and pairs lead somewhere."""
    if found.items is None or found.pairs is None or found.total is None or found.difference is None:
        return
    m, count = len(found.items), len(found.pairs)
    inside = not m or (
        found.items[0] >= 0 and found.items[-1] < len(found.popularity) and (np.diff(found.items) > 0).all()
    )
    paired = found.pairs.shape == (count, 2) and (
        not count
        or (
            bool((found.pairs[:, 0] >= 0).all() and (found.pairs[:, 0] < found.pairs[:, 1]).all())
            and int(found.pairs.max()) < m
        )
    )
    if found.again is not None and len(found.again) != len(found.popularity):
        raise DpformerError(f"{path}: popularity was released again, of other items")
    if not inside or not paired or len(found.total) != count or len(found.difference) != count:
        raise DpformerError(f"{path}: its pairs are not of its items")
    for one in found.rounds:
        fits = len(one.noisy) == len(one.cells) * (2 if ROUNDS[one.number].directed else 1)
        if not fits or (len(one.cells) and (one.cells[0] < 0 or one.cells[-1] >= m * (m - 1) // 2)):
            raise DpformerError(f"{path}: round {one.number} is not of pairs of its items")
        if (np.diff(one.cells) <= 0).any():
            raise DpformerError(f"{path}: the pairs of round {one.number} are not in order")
