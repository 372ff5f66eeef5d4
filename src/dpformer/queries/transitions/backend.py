"""The backend that sums the counts of a data set."""

from collections.abc import Iterator
from contextlib import contextmanager

from dpformer.data.dataset import Dataset
from dpformer.data.sources.spark import ClusterLog
from dpformer.engines.duckdb_sums import duckdb_sums
from dpformer.engines.sums import ArraySums, Sums

MOST_IN_MEMORY = 1 << 28  # interactions


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
    arrays = dataset.items, dataset.train_starts, dataset.train_stops
    if (chosen or ("duckdb" if dataset.num_interactions > MOST_IN_MEMORY else "numpy")) == "numpy":
        yield ArraySums(*arrays)
        return
    with duckdb_sums(*arrays, memory=memory) as sums:
        yield sums
