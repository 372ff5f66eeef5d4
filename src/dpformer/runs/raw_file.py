"""`releases.safetensors`: the noisy numbers as they came out of the mechanisms, before anything was made of them.

They are covered by the guarantee like the model, which is made of them. Whoever has the data can count again and see
that the noise is there (`verify`); nothing else reads the file, and it need not be published.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from dpformer.errors import DpformerError
from dpformer.files import replacing
from dpformer.releases.counts import TransitionRelease
from dpformer.releases.frequencies import FrequencyRelease

KINDS = {"popularity": np.float64, "items": np.int64, "pairs": np.int64, "total": np.float64, "difference": np.float64}


@dataclass(frozen=True)
class RawReleases:
    """Noisy counts of popularity (M,), and of transitions what `TransitionRelease` has under the same names."""

    popularity: np.ndarray
    items: np.ndarray | None = None
    pairs: np.ndarray | None = None
    total: np.ndarray | None = None
    difference: np.ndarray | None = None


def save_releases(path: Path, frequencies: FrequencyRelease, transitions: TransitionRelease | None = None) -> None:
    """Writes what was released, whole or not at all."""
    arrays = {"popularity": frequencies.counts}
    if transitions is not None:
        arrays |= {name: getattr(transitions, name) for name in ("items", "pairs", "total", "difference")}
    with replacing(path) as part:
        part.write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def load_releases(path: Path) -> RawReleases:
    """Reads it again; anything else is refused in one sentence."""
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DpformerError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if set(arrays) not in ({"popularity"}, set(KINDS)):
        raise DpformerError(f"{path} holds {', '.join(sorted(arrays))}, which is not what a run releases")
    for name, array in arrays.items():
        if array.dtype != KINDS[name] or array.ndim != 1 + (name == "pairs") or not np.isfinite(array).all():
            raise DpformerError(f"{path}: {name} is not a table of finite {KINDS[name].__name__}")
    found = RawReleases(**arrays)
    _check(path, found)
    return found


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
    if not inside or not paired or len(found.total) != count or len(found.difference) != count:
        raise DpformerError(f"{path}: its pairs are not of its items")
