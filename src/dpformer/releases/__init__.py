"""Every touch of the data besides training: vocabulary, frequencies, counts, metrics. Imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.releases.counts import TransitionRelease, release_transitions
    from dpformer.releases.frequencies import FrequencyRelease, release_frequencies
    from dpformer.releases.metrics import MetricRelease, release_metrics
    from dpformer.releases.vocabulary import SparseHistogram, sparse_histogram

_HOME = {
    "FrequencyRelease": "frequencies",
    "MetricRelease": "metrics",
    "SparseHistogram": "vocabulary",
    "TransitionRelease": "counts",
    "release_frequencies": "frequencies",
    "release_metrics": "metrics",
    "release_transitions": "counts",
    "sparse_histogram": "vocabulary",
}

__all__ = [
    "FrequencyRelease",
    "MetricRelease",
    "SparseHistogram",
    "TransitionRelease",
    "release_frequencies",
    "release_metrics",
    "release_transitions",
    "sparse_histogram",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.releases.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpformer.releases' has no attribute {name!r}")
