"""The accuracy of a run on held-out data. None of it is covered by the guarantee."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpformer.data import Dataset
from dpformer.data.sources.urls import resolved
from dpformer.errors import DpformerError
from dpformer.runs.evaluation_cache import EvaluationCache
from dpformer.runs.folder import RunFolder
from dpformer.runs.tasks import Measured, recommend, task_of
from dpformer.runs.trust import followed, is_own

if TYPE_CHECKING:
    from dpformer.runs.config import Config
    from dpformer.runs.run import Run


def measure(
    run: Run,
    data: str | Path | None = None,
    *,
    split: str = "test",
    filter_seen: bool = True,
    reading: Mapping[str, Any] | None = None,
) -> Measured:
    """The accuracy of the released model on the run's own held-out data, or on another file.

    Args:
        run: the run whose model is evaluated.
        data: another log; by default the run's log, which is read only if the run is the user's own.
        split: "test" or "validation".
        filter_seen: as for `recommend`, whose results are evaluated.
        reading: reading options that differ from training (`Config.on_file`).
    """
    config, other = _places(run, data, reading)
    folder = RunFolder(run.folder)
    kept = EvaluationCache(folder) if is_own(folder) else None  # a folder from someone else may hold any numbers
    return task_of(config).measure(config, run.release, other, split, filter_seen=filter_seen, kept=kept)


def held_out_data(run: Run, data: str | Path | None = None) -> Dataset:
    """The data of a recommender, prepared again, or another log with its vocabulary."""
    config, other = _places(run, data, None)
    return recommend.held_out_data(config, run.release, other)


def _places(run: Run, data: str | Path | None, reading: Mapping[str, Any] | None) -> tuple[Config, Config | None]:
    """The config of the run's own data and, for another log or other reading options, the config of that log."""
    folder, named = RunFolder(run.folder), None if data is None else Path(data)
    own = run.config.file
    same = named is None or (own is not None and resolved(named) == resolved(own))
    of_training = () if same else ("since", "until") if run.config.split_at is None else ("since",)
    if same and not reading and is_own(folder):
        return followed(folder, run.config), None  # in the state it was trained on
    period = dict.fromkeys(of_training)  # the time window of training does not apply to another log
    config = followed(folder, run.config, named, **{**period, **(reading or {})})
    if not is_own(folder):
        return config, None
    if config.file is None and reading:
        raise DpformerError("the run has no file of its own: give the log to read with these options")
    return run.config, config
