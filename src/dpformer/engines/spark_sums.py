"""Sums of counts by Spark, for logs in a cluster: rows stay there, only sums come to this machine."""

import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from dpformer.engines.duckdb_connection import default_memory
from dpformer.engines.sql_sums import SqlSums, history_rows
from dpformer.errors import DpformerError, MissingExtra

ROWS_AT_ONCE = 1 << 23  # rows of a result on this machine
ROWS_OF_A_PART = 1 << 18  # of a log, in the cluster: three million pairs
_PARTITIONS = "spark.sql.shuffle.partitions"


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

    def spread(self, led: str, other: str, weights: dict[int, int]) -> str:
        """One pass over the rows, where a join with the distances would be one for each."""
        pairs = ", ".join(f"x{k}, CAST({weight} AS BIGINT)" for k, weight in weights.items())
        return f"SELECT u, x, y, w FROM {led} LATERAL VIEW stack({len(weights)}, {pairs}) AS y, w WHERE x IS NOT NULL"

    def normed(self, vectors: str) -> str:
        """By a window: rows of a user are on one machine, and a join would make the vectors twice."""
        return f"SELECT c, v, CAST(sum(v * v) OVER (PARTITION BY u) AS BIGINT) AS s FROM {vectors}"

    def blocks(self, sql: str) -> Iterator[Sequence[np.ndarray]]:
        """The result stays in the cluster, in memory or on disk; here are about ROWS_AT_ONCE rows at a time.

        It is sorted here: a sort in the cluster would compute it twice.
        """
        result = self.session.sql(sql).persist()
        try:
            result.createOrReplaceTempView("result")
            key, rows = result.columns[0], result.count()
            edges = self._edges(key, -(-rows // ROWS_AT_ONCE))
            for low, high in zip([None, *edges], [*edges, None], strict=True):
                tests = [f"{key} > {low}"] * (low is not None) + [f"{key} <= {high}"] * (high is not None)
                where = f" WHERE {' AND '.join(tests)}" if tests else ""
                found = self.query(f"SELECT * FROM result{where}")
                order = np.argsort(found[0])
                yield [column[order] for column in found]
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


def spark_session(memory: str | None = None, **options: str) -> Any:
    """The active SparkSession, or one as configured on this machine (spark-submit, spark-defaults.conf).

    The Java process of a new session writes to a temporary file, which is read only if it does not start. If nothing is
    configured its limit is `memory`, by default that of other engines; Spark's own default is 1 GB.
    """
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # it reports an interrupted call with its stack
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # pandas 3, of which nothing is used here
        try:
            import pyarrow  # noqa: F401
            from pyspark.sql import SparkSession
        except ImportError:
            raise MissingExtra("pyspark", "spark") from None
        found = SparkSession.getActiveSession()
        if found is not None:
            return found
        builder = SparkSession.builder.appName("dpformer").config("spark.ui.showConsoleProgress", "false")
        builder = builder.config("spark.log.level", "ERROR")
        if not _is_configured():
            builder = builder.config("spark.driver.memory", _java_memory(memory or default_memory()))
        for name, value in options.items():
            builder = builder.config(name.replace("_", "."), value)
        with _stderr_aside() as log:
            try:
                return builder.getOrCreate()
            except Exception as error:  # no Java, or no cluster: py4j has no class of its own for it
                said = (str(error).splitlines() or [type(error).__name__])[0][:200]
                if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
                    said = "there is no Java"
                elif "gateway" in said:
                    said = (_last_line(log) or said)[:200]
                raise DpformerError(f"Spark does not start: {said}") from None


def _is_configured() -> bool:
    """Whether Spark is configured here already: by spark-submit, or a file of defaults."""
    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(os.environ.get("SPARK_HOME", ""), "conf")
    return "PYSPARK_GATEWAY_PORT" in os.environ or os.path.isfile(os.path.join(folder, "spark-defaults.conf"))


def _java_memory(amount: str) -> str:
    """An amount of memory as Java writes it: 4GB or 3814MiB as 4g or 3814m."""
    found = re.fullmatch(r"\s*(\d+)\s*([KMGT])i?B?\s*", amount, re.IGNORECASE)
    if found is None:
        raise DpformerError(f"memory is {amount!r}; give an amount such as 4GB")
    return f"{found[1]}{found[2].lower()}"


def for_size(session: Any, rows: int) -> None:
    """Cuts shuffles by the size of the log, unless their number is configured (Spark's default is 200)."""
    if session.sparkContext.getConf().contains(_PARTITIONS):
        return
    parts = max(session.sparkContext.defaultParallelism, -(-rows // ROWS_OF_A_PART))
    session.conf.set(_PARTITIONS, str(parts))


@contextmanager
def _stderr_aside() -> Iterator[IO[bytes]]:
    """Processes that are started meanwhile write their errors to a file."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        own = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(own, 2)
            os.close(own)


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("at ")), "")


@contextmanager
def local_spark(threads: int = 2) -> Iterator[Any]:
    """A SparkSession on this machine only."""
    session = spark_session(
        spark_master=f"local[{threads}]",
        spark_ui_enabled="false",
        spark_driver_host="127.0.0.1",
        spark_driver_memory="4g",
    )
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()
