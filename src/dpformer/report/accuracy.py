"""The accuracy of a run on held-out data. None of it is covered by the guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpformer.data import Dataset
from dpformer.runs.evaluation_cache import EvaluationCache
from dpformer.runs.folder import RunFolder
from dpformer.runs.tasks import Measured, recommend, task_of
from dpformer.runs.trust import followed, is_own

if TYPE_CHECKING:
    from dpformer.runs.config import Config
    from dpformer.runs.run import Run


def measure(run: Run, data: str | Path | None = None, *, split: str = "test", filter_seen: bool = True) -> Measured:
    """The accuracy of the released model on the run's own held-out data, or on another file.

    `filter_seen` as for `recommend`: what is measured is what it would give.

    The run's own data is found only if the run is one's own; a stranger's folder names files that it should not.
    """
    config, other = _places(run, data)
    folder = RunFolder(run.folder)
    kept = EvaluationCache(folder) if is_own(folder) else None  # a stranger's folder may hold any numbers
    return task_of(config).measure(config, run.release, other, split, filter_seen=filter_seen, kept=kept)


def held_out_data(run: Run, data: str | Path | None = None) -> Dataset:
    """The data of a recommender prepared again, or another log with its vocabulary."""
    config, other = _places(run, data)
    return recommend.held_out_data(config, run.release, other)


def _places(run: Run, data: str | Path | None) -> tuple[Config, Path | None]:
    folder, named = RunFolder(run.folder), None if data is None else Path(data)
    return (run.config if is_own(folder) else followed(folder, run.config, named)), named
