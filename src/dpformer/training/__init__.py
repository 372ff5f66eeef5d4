"""The training step: plan, sampling, clipped sums, noise, optimizer; one process or several. Imported on first use."""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names

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

__getattr__ = lazy_names(__name__, _HOME)
