"""A run, from config to released model: folder, checkpoint, resume, model file, statement. Imported on first use."""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names

if TYPE_CHECKING:
    from dpformer.runs.config import Config
    from dpformer.runs.model_file import Release, load_release, save_release
    from dpformer.runs.planning import make_plan
    from dpformer.runs.prepare_training import load_dataset
    from dpformer.runs.run import Interrupted, Run, finished, resume, train

_HOME = {
    "Config": "config",
    "Interrupted": "run",
    "Release": "model_file",
    "Run": "run",
    "finished": "run",
    "load_dataset": "prepare_training",
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
