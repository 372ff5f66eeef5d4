"""Private queries, besides training: vocabulary, frequencies, counts, metrics. Imported on first use."""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names

if TYPE_CHECKING:
    from dpformer.queries.frequencies import FrequencyRelease, release_frequencies
    from dpformer.queries.items import ItemRelease, release_items
    from dpformer.queries.metrics import MetricRelease, release_metrics
    from dpformer.queries.transitions.rounds import TransitionRelease, release_transitions

_HOME = {
    "FrequencyRelease": "frequencies",
    "ItemRelease": "items",
    "MetricRelease": "metrics",
    "TransitionRelease": "transitions.rounds",
    "release_frequencies": "frequencies",
    "release_items": "items",
    "release_metrics": "metrics",
    "release_transitions": "transitions.rounds",
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

__getattr__ = lazy_names(__name__, _HOME)
