"""Every touch of the data besides training: vocabulary, frequencies, counts, metrics. Imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.releases.counts import TransitionRelease, release_transitions
    from dpformer.releases.frequencies import FrequencyRelease, release_frequencies
    from dpformer.releases.items import ItemRelease, release_items
    from dpformer.releases.metrics import MetricRelease, release_metrics

_HOME = {
    "FrequencyRelease": "frequencies",
    "ItemRelease": "items",
    "MetricRelease": "metrics",
    "TransitionRelease": "counts",
    "release_frequencies": "frequencies",
    "release_items": "items",
    "release_metrics": "metrics",
    "release_transitions": "counts",
}

__all__ = [
    "FrequencyRelease",
    "ItemRelease",
    "MetricRelease",
    "TransitionRelease",
    "release_frequencies",
    "release_items",
    "release_metrics",
    "release_transitions",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.releases.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpformer.releases' has no attribute {name!r}")
