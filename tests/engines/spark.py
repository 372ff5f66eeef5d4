"""A Spark on this machine, for tests; where pyspark or Java is missing they are skipped, with the reason."""

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
    with local_spark(2) as session:
        yield session
