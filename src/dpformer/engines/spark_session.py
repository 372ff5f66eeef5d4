"""A session of Spark: found, or started on this machine, with its messages out of sight."""

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from dpformer.engines.duckdb_connection import default_memory
from dpformer.errors import DpformerError, MissingExtra

_SHIPPED: WeakSet[Any] = WeakSet()  # contexts whose workers have this package


def spark_session(memory: str | None = None, **options: str) -> Any:
    """The active SparkSession, or one as configured on this machine (spark-submit, spark-defaults.conf).

    The Java process of a new session writes to a temporary file, which is read only if it does not start. If nothing is
    configured its limit is `memory`, by default that of other engines; Spark's own default is 1 GB.
    """
    # py4j reports an interrupted call with its stack, to two loggers.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_not_of_interrupt)
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")  # of which nothing is used here
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
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # of workers on this machine
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


def _not_of_interrupt(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("KeyboardInterrupt while sending command")


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


def ship_code(context: Any) -> None:
    """Sends this package to the workers, once: it need not be installed there, but NumPy and PyArrow must be."""
    if context in _SHIPPED:
        return
    folder = Path(tempfile.mkdtemp(prefix="dpformer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # workers fetch it as long as the session lives
    package = Path(__file__).parents[1]
    with zipfile.ZipFile(folder / "dpformer.zip", "w") as packed:
        for path in (package, package / "engines"):
            for file in path.glob("*.py"):
                packed.write(file, file.relative_to(package.parent))
    context.addPyFile(str(folder / "dpformer.zip"))
    sys.path.remove(next(path for path in sys.path if path.endswith("dpformer.zip")))  # it is for workers
    _SHIPPED.add(context)


@contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """Errors of Spark and of its workers as one sentence."""
    try:
        yield
    except Exception as error:
        if _caused_by_interrupt(error):
            raise KeyboardInterrupt from None
        if type(error).__module__.split(".")[0] not in ("pyspark", "py4j"):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        of_worker = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception): ", line)]
        said = next(iter([*of_worker[-1:], *lines]), type(error).__name__)
        raise DpformerError(f"{what}: {said[:300]}") from None


def _caused_by_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupted call of Spark ended in this error, when it was cleaned up."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


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
