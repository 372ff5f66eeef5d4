from pathlib import Path
from typing import Any

import pytest

from dpformer.runs import Config
from tests.training.logs import tiny_choices, write_log
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this folder)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.csv")


@pytest.fixture
def tiny(log: Path) -> Config:
    """A config whose run takes a second."""
    return tiny_config(log)


def tiny_config(log: Path, **changes: Any) -> Config:
    """Small choices. Of so few users no list of items could be released: it is assumed public, unless said."""
    if "catalog" not in changes and changes.get("task") != "lm":
        changes = {"assume_items_public": True, **changes}
    return Config.make(file=log, **tiny_choices(**{"seed": 7, "micro_batch_tokens": 40, **changes}))
