"""Sums of counts by Spark, for logs that are in a cluster: rows stay there, only sums come here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpformer.data.sql_sums import SqlSums, history_rows
from dpformer.data.vocabulary import Vocabulary
from dpformer.errors import DpformerError
from dpformer.releases.sums import LONGEST


class Spark:
    """See `sql_sums.Engine`; `session` is a SparkSession."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def table(self, name: str, columns: dict[str, np.ndarray]) -> None:
        self.rows(name, list(columns), list(zip(*(values.tolist() for values in columns.values()), strict=True)))

    def rows(self, name: str, columns: list[str], rows: list[tuple[Any, ...]], text: str = "") -> None:
        """Makes or replaces a table of whole numbers; the column `text` holds text."""
        kinds = ", ".join(f"{column} {'STRING' if column == text else 'BIGINT'}" for column in columns)
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


def table_sums(session: Any, table: str, vocabulary: Vocabulary, *, user: str, item: str, time: str) -> SqlSums:
    """Sums of a table of events with the items of a public vocabulary; others are left out.

    Rows of the same user and time are ordered by item: a table has no order of its own.
    """
    made = Spark(session)
    made.rows("vocabulary_items", ["i", "id"], list(enumerate(vocabulary.ids)), text="id")
    missing = session.sql(f"SELECT count(*) FROM {table} WHERE {user} IS NULL OR {time} IS NULL").collect()[0][0]
    if missing:
        raise DpformerError(f"{table} has {missing:,} rows without {user} or {time}: filter them out first")
    known = (
        f"SELECT CAST({user} AS STRING) AS u, {time} AS t, i FROM {table} JOIN vocabulary_items "
        f"ON CAST({item} AS STRING) = id"
    )
    ordered = "SELECT u, i, row_number() OVER (PARTITION BY u ORDER BY t, i) AS p, count(*) OVER (PARTITION BY u) AS n"
    found = session.sql(f"SELECT u, i, p FROM ({ordered} FROM ({known})) WHERE p > n - {LONGEST}").cache()
    found.createOrReplaceTempView("histories")
    return SqlSums(made, int(session.sql("SELECT count(DISTINCT u) FROM histories").collect()[0][0]))


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
