"""The mechanism that some settings select."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpformer.noise.mechanisms.base import MECHANISMS, Noise
from dpformer.noise.mechanisms.independent import INDEPENDENT


def noise_of(settings: Mapping[str, Any]) -> Noise:
    """The noise of a config, a state, a statement or an event, whose fields include its settings.

    >>> noise_of({"epsilon": 5.0, "bands": 8})
    Banded(bands=8)
    >>> noise_of({"epsilon": 5.0})
    Independent()
    """
    found = [noise for kind in MECHANISMS if (noise := kind.of(settings)) is not None]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(noise.choice for noise in found)}: choose one kind of noise")
    return found[0] if found else INDEPENDENT
