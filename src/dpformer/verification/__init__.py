"""What a stranger can check: `verify` a run folder, `audit` the mechanism. Names are imported on first use."""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names

if TYPE_CHECKING:
    from dpformer.verification.claims import Verification
    from dpformer.verification.verify import verify

_HOME = {
    "Verification": "claims",
    "verify": "verify",
}

__all__ = [
    "Verification",
    "verify",
]

__getattr__ = lazy_names(__name__, _HOME)
