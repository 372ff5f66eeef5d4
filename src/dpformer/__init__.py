"""dpformer: train Transformers on private sequences with user-level differential privacy.

The public names are listed in `__all__`; they are imported on first use, so that `import dpformer` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dpformer import data, evaluation, models, reattention
    from dpformer.clipping import PhantomClipping, UnsupportedUse, check, clip, normalize, softmax_loss
    from dpformer.privacy import Ledger, PoissonBatches, calibrate
    from dpformer.recommender import LanguageModel, Recommender, load
    from dpformer.releases import release_frequencies
    from dpformer.training import PrivateOptimizer

_HOME = {
    "PhantomClipping": "clipping",
    "UnsupportedUse": "clipping",
    "check": "clipping",
    "clip": "clipping",
    "normalize": "clipping",
    "softmax_loss": "clipping",
    "Ledger": "privacy",
    "PoissonBatches": "privacy",
    "calibrate": "privacy",
    "release_frequencies": "releases",
    "PrivateOptimizer": "training",
    "LanguageModel": "recommender",
    "Recommender": "recommender",
    "load": "recommender",
}
_SUBPACKAGES = (
    "clipping", "data", "evaluation", "models", "privacy", "reattention", "releases", "report", "runs", "training",
    "verification",
)  # fmt: skip

__all__ = [
    "LanguageModel",
    "Ledger",
    "PhantomClipping",
    "PoissonBatches",
    "PrivateOptimizer",
    "Recommender",
    "UnsupportedUse",
    "calibrate",
    "check",
    "clip",
    "data",
    "evaluation",
    "load",
    "models",
    "normalize",
    "reattention",
    "release_frequencies",
    "softmax_loss",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.{_HOME[name]}"), name)
    if name in _SUBPACKAGES:
        return import_module(f"dpformer.{name}")
    raise AttributeError(f"module 'dpformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
