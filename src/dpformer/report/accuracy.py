"""The accuracy of a run on held-out data. None of it is covered by the guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpformer.data import Dataset
from dpformer.runs.tasks import Measured, recommend, task_of

if TYPE_CHECKING:
    from dpformer.runs.run import Run


def measure(run: Run, data: str | Path | None = None, *, split: str = "test") -> Measured:
    """The accuracy of the released model on the run's own held-out data, or on another file."""
    return task_of(run.config).measure(run.config, run.release, None if data is None else Path(data), split)


def held_out_data(run: Run, data: str | Path | None = None) -> Dataset:
    """The data of a recommender prepared again, or another log with its vocabulary."""
    return recommend.held_out_data(run.config, run.release, None if data is None else Path(data))
