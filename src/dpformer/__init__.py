"""dpformer: train Transformers on private sequences with user-level differential privacy.

The public names are listed in `__all__`; they are imported on first use, so that `import dpformer` does not load torch.
"""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names
from dpformer.version import __version__ as __version__

if TYPE_CHECKING:
    from dpformer import data, evaluation, models, reattention
    from dpformer.accounting import Ledger, calibrate
    from dpformer.clipping import PhantomClipping, UnsupportedUse, check, clip, normalize
    from dpformer.models import softmax_loss
    from dpformer.queries import release_frequencies
    from dpformer.recommender import LanguageModel, Recommender, load
    from dpformer.sampling import PoissonBatches
    from dpformer.training import PrivateOptimizer

_HOME = {
    "PhantomClipping": "clipping",
    "UnsupportedUse": "clipping",
    "check": "clipping",
    "clip": "clipping",
    "normalize": "clipping",
    "softmax_loss": "models",
    "Ledger": "accounting",
    "PoissonBatches": "sampling",
    "calibrate": "accounting",
    "release_frequencies": "queries",
    "PrivateOptimizer": "training",
    "LanguageModel": "recommender",
    "Recommender": "recommender",
    "load": "recommender",
}
_SUBPACKAGES = (
    "accounting", "clipping", "data", "evaluation", "models", "noise", "queries", "reattention", "report", "runs",
    "sampling", "statement", "training", "verification",
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


__getattr__ = lazy_names(__name__, _HOME, _SUBPACKAGES)


def __dir__() -> list[str]:
    return sorted(__all__)
