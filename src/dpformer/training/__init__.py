"""Training: the plan, the DP optimiser step, the loop, checkpoints, the run folder. Names are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.training.config import Config
    from dpformer.training.optimizer import PrivateOptimizer
    from dpformer.training.plan import Plan, make_plan
    from dpformer.training.release import Release, load_release, save_release
    from dpformer.training.run import Interrupted, Run, finished, resume, train
    from dpformer.training.start import load_dataset

_HOME = {
    "Config": "config",
    "Interrupted": "run",
    "Plan": "plan",
    "PrivateOptimizer": "optimizer",
    "Release": "release",
    "Run": "run",
    "finished": "run",
    "load_dataset": "start",
    "load_release": "release",
    "make_plan": "plan",
    "resume": "run",
    "save_release": "release",
    "train": "run",
}

__all__ = [
    "Config",
    "Interrupted",
    "Plan",
    "PrivateOptimizer",
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


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.training.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpformer.training' has no attribute {name!r}")
