"""The backend that sums the counts of a data set."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpformer.data.dataset import Dataset
from dpformer.data.sources.spark import ClusterLog
from dpformer.engines.duckdb_sums import duckdb_sums
from dpformer.engines.sums import ArraySums, Sums

MOST_IN_MEMORY = 1 << 28  # interactions


def array_sums(dataset: Dataset) -> ArraySums:
    """The sums over all users' training items, from arrays."""
    return ArraySums(*_arrays(dataset))


def _arrays(dataset: Dataset) -> tuple[Any, ...]:
    return dataset.items, dataset.train_starts, dataset.train_stops, dataset.weights, dataset.sessions


@contextmanager
def transition_sums(
    dataset: Dataset | ClusterLog, chosen: str | None = None, memory: str | None = None
) -> Iterator[Sums]:
    """The sums over all users' training items, from arrays, DuckDB or Spark: the same integers.

    Arrays take a third of the processor time, but need memory for the histories; DuckDB has a limit of memory for these
    too.
    """
    if isinstance(dataset, ClusterLog):
        yield dataset.sums()
        return
    if (chosen or ("duckdb" if dataset.num_interactions > MOST_IN_MEMORY else "numpy")) == "numpy":
        yield array_sums(dataset)
        return
    with duckdb_sums(*_arrays(dataset), memory=memory) as sums:
        yield sums
