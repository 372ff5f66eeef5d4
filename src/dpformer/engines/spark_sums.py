"""Sums of counts by Spark, for logs in a cluster: rows stay there, only sums come to this machine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpformer.engines.sql_sums import SqlSums, history_rows
from dpformer.errors import DpformerError, MissingExtra

ROWS_AT_ONCE = 1 << 23  # rows of a result on this machine


class Spark:
    """See `sql_sums.Backend`; `session` is a SparkSession."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def table(self, name: str, columns: dict[str, np.ndarray]) -> None:
        import pyarrow

        given = pyarrow.table({column: np.asarray(values, dtype=np.int64) for column, values in columns.items()})
        self.session.createDataFrame(given).createOrReplaceTempView(name)

    def query(self, sql: str) -> Sequence[np.ndarray]:
        found = self.session.sql(sql).toArrow()
        return [np.asarray(column.to_numpy(), dtype=np.int64) for column in found.columns]

    def blocks(self, sql: str) -> Iterator[Sequence[np.ndarray]]:
        """The result stays in the cluster, in memory or on disk; here are about ROWS_AT_ONCE rows at a time."""
        result = self.session.sql(sql).persist()
        try:
            result.createOrReplaceTempView("result")
            key, rows = result.columns[0], result.count()
            edges = self._edges(key, -(-rows // ROWS_AT_ONCE))
            for low, high in zip([None, *edges], [*edges, None], strict=True):
                tests = [f"{key} > {low}"] * (low is not None) + [f"{key} <= {high}"] * (high is not None)
                where = f" WHERE {' AND '.join(tests)}" if tests else ""
                yield self.query(f"SELECT * FROM result{where} ORDER BY {key}")
        finally:
            result.unpersist()

    def _edges(self, key: str, parts: int) -> list[int]:
        """Values that split the result into parts of similar size."""
        if parts < 2:
            return []
        shares = ", ".join(f"{number / parts!r}D" for number in range(1, parts))
        found = self.session.sql(
            f"SELECT percentile_approx({key}, array({shares}), {100 * parts}) AS edges FROM result"
        )
        return sorted({int(edge) for edge in found.collect()[0]["edges"]})


def spark_sums(session: Any, items: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> SqlSums:
    """Sums of histories in arrays, user u's items at items[starts[u]:stops[u]]."""
    made = Spark(session)
    made.table("histories", history_rows(items, starts, stops))
    return SqlSums(made, len(starts))


def spark_session(**options: str) -> Any:
    """The active SparkSession, or one as configured on this machine (spark-submit, spark-defaults.conf)."""
    try:
        import pyarrow  # noqa: F401
        from pyspark.sql import SparkSession
    except ImportError:
        raise MissingExtra("pyspark", "spark") from None
    builder = SparkSession.builder.appName("dpformer")
    for name, value in options.items():
        builder = builder.config(name.replace("_", "."), value)
    try:
        return builder.getOrCreate()
    except Exception as error:  # no Java, or no cluster: py4j raises various types
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DpformerError(f"Spark does not start; it needs a Java (default-jre-headless): {said}") from None


@contextmanager
def local_spark(threads: int = 2) -> Iterator[Any]:
    """A SparkSession on this machine only."""
    session = spark_session(
        spark_master=f"local[{threads}]",
        spark_ui_enabled="false",
        spark_sql_shuffle_partitions="2",
        spark_driver_host="127.0.0.1",
        spark_driver_memory="4g",
    )
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
