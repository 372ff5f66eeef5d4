"""`releases.safetensors`: the noisy query results, before anything was computed from them.

They are covered by the guarantee, as is the model that is computed from them. Anyone with the data can count again
and check that the noise is there (`verify`); nothing else reads the file, and it need not be published.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from dpformer.errors import DpformerError
from dpformer.files import replacing
from dpformer.queries.registry import all_queries


def save_releases(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the released arrays, atomically."""
    with replacing(path) as part:
        part.write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def load_releases(path: Path) -> dict[str, np.ndarray]:
    """Read released arrays: known to some query, finite and of the right type. Anything else is refused.

    Whether they are consistent is for the query to check (`Query.restore`).
    """
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DpformerError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    for name, array in arrays.items():
        kind = next((kind for query in all_queries() if (kind := query.array_kinds(name)) is not None), None)
        if kind is None:
            raise DpformerError(f"{path} holds {name[:200]!r}, which no run releases")
        if (array.dtype, array.ndim) != kind or not np.isfinite(array).all():
            raise DpformerError(f"{path}: {name} is not a table of finite {kind[0].__name__}")
    return arrays
