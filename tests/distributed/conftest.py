from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpformer.training import Config
from tests.training.conftest import tiny_config
from tests.training.logs import write_log
from tests.training.memo import remember


@pytest.fixture(autouse=True, scope="package")
def accountant_remembers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        remember(patch.setattr)
        yield


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.csv")


@pytest.fixture
def config(log: Path) -> Config:
    return config_of(log)


def config_of(log: Path, **changes: Any) -> Config:
    """Micro-batches of 3 users or so, so that there is something to deal out; with dropout."""
    return tiny_config(log, **{"micro_batch_tokens": 15, "checkpoint_seconds": 0.0, "dropout": 0.2, **changes})
