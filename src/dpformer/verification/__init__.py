"""What a stranger can check: `verify` a run folder, `audit` the mechanism. Names are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.verification.verify import Verification, verify

_HOME = {
    "Verification": "verify",
    "verify": "verify",
}

__all__ = [
    "Verification",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.verification.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpformer.verification' has no attribute {name!r}")
