"""A run, from config to released model: folder, checkpoint, resume, model file, statement. Imported on first use."""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names

if TYPE_CHECKING:
    from dpformer.runs.config import Config
    from dpformer.runs.model_file import Release, load_release, save_release
    from dpformer.runs.planning import make_plan
    from dpformer.runs.run import Run, finished, resume, train
    from dpformer.runs.signals import Interrupted
    from dpformer.runs.tasks import load_dataset

_HOME = {
    "Config": "config",
    "Interrupted": "signals",
    "Release": "model_file",
    "Run": "run",
    "finished": "run",
    "load_dataset": "tasks",
    "load_release": "model_file",
    "make_plan": "planning",
    "resume": "run",
    "save_release": "model_file",
    "train": "run",
}

__all__ = [
    "Config",
    "Interrupted",
    "Release",
    "Run",
    "finished",
    "load_dataset",
    "load_release",
    "make_plan",
    "resume",
    "save_release",
    "train",
]

__getattr__ = lazy_names(__name__, _HOME)
