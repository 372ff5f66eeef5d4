from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpformer import runs as training
from dpformer.runs import Config
from tests.training.conftest import tiny_config
from tests.training.logs import write_log
from tests.training.memo import remember


@pytest.fixture(autouse=True, scope="package")
def accountant_remembers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        remember(patch.setattr)
        yield


Alone = Callable[[Config], Path]


@pytest.fixture(scope="package")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("data") / "log.csv")


@pytest.fixture(scope="package")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The run folder that one process makes of a config, made once."""
    made: dict[str, Path] = {}

    def run(config: Config) -> Path:
        if config.hash() not in made:
            made[config.hash()] = tmp_path_factory.mktemp("alone") / "run"
            training.train(config, made[config.hash()])
        return made[config.hash()]

    return run


def config_of(log: Path, **changes: Any) -> Config:
    """Micro-batches of 3 users or so, so that there is something to deal out; with dropout."""
    return tiny_config(log, **{"micro_batch_tokens": 15, "checkpoint_seconds": 0.0, "dropout": 0.2, **changes})
