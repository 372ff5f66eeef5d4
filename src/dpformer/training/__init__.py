"""The training step: plan, sampling, clipped sums, noise, optimizer; one process or several. Imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.training.gradient_sum import GradientSum
    from dpformer.training.optimizer import PrivateOptimizer
    from dpformer.training.plan import Plan
    from dpformer.training.trainer import Trainer

_HOME = {
    "GradientSum": "gradient_sum",
    "Plan": "plan",
    "PrivateOptimizer": "optimizer",
    "Trainer": "trainer",
}

__all__ = [
    "GradientSum",
    "Plan",
    "PrivateOptimizer",
    "Trainer",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.training.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpformer.training' has no attribute {name!r}")
