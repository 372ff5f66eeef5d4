"""The training step: plan, sampling, clipped sums, noise, optimizer; one process or several. Imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.training.optimizer import PrivateOptimizer
    from dpformer.training.plan import Plan, make_plan

_HOME = {
    "Plan": "plan",
    "PrivateOptimizer": "optimizer",
    "make_plan": "plan",
}

__all__ = [
    "Plan",
    "PrivateOptimizer",
    "make_plan",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.training.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpformer.training' has no attribute {name!r}")
