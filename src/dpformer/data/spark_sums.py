"""Sums of counts by Spark, for logs that are in a cluster: rows stay there, only sums come here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpformer.data.sql_sums import SqlSums, history_rows
from dpformer.errors import DpformerError


class Spark:
    """See `sql_sums.Engine`; `session` is a SparkSession."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def table(self, name: str, columns: dict[str, np.ndarray]) -> None:
        rows = list(zip(*(values.tolist() for values in columns.values()), strict=True))
        kinds = ", ".join(f"{column} BIGINT" for column in columns)
        self.session.createDataFrame(rows, kinds).createOrReplaceTempView(name)

    def query(self, sql: str) -> Sequence[np.ndarray]:
        rows = self.session.sql(sql).collect()
        width = 2 if not rows else len(rows[0])
        return [np.array([row[column] for row in rows], dtype=np.int64) for column in range(width)]


def spark_sums(session: Any, items: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> SqlSums:
    """Sums of histories in arrays, user u's items at items[starts[u]:stops[u]]."""
    made = Spark(session)
    made.table("histories", history_rows(items, starts, stops))
    return SqlSums(made, len(starts))


@contextmanager
def local_spark(threads: int = 2) -> Iterator[Any]:
    """A SparkSession on this machine alone."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise DpformerError("Spark needs pyspark and a Java: pip install 'dpformer[spark]'") from None
    builder = SparkSession.builder.master(f"local[{threads}]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.shuffle.partitions", "2").config("spark.driver.host", "127.0.0.1").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
