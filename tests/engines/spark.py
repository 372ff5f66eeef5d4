"""A Spark on this machine, for tests; where pyspark or Java is missing they are skipped, with the reason."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from dpformer.engines.spark_session import local_spark


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'dpformer[spark]'")
    if shutil.which("java") is None:
        pytest.skip("there is no Java: apt-get install default-jre-headless")
    # Tests run each query once: time in the optimising compiler and in parallel collectors would not come back.
    os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    with local_spark(2) as session:
        session.conf.set("spark.sql.shuffle.partitions", "2")  # instead of 200
        yield session
