"""A released model in use: ranking for many histories at once, and a service over HTTP with a page.

Only model.safetensors and privacy.json are read, never the data. Names are imported on first use, as they need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.serving.app import create_app
    from dpformer.serving.ranking import Ranker
    from dpformer.serving.served import Limits, Served

_HOME = {"Limits": "served", "Ranker": "ranking", "Served": "served", "create_app": "app"}

__all__ = ["Limits", "Ranker", "Served", "create_app"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.serving.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpformer.serving' has no attribute {name!r}")
