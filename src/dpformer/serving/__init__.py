"""A released model in use: ranking for many histories at once, and an HTTP service with a page.

Only model.safetensors and privacy.json are read, never the data. Names are imported on first use, as they need torch.
"""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names

if TYPE_CHECKING:
    from dpformer.serving.access import Access
    from dpformer.serving.app import create_app
    from dpformer.serving.limits import Limits
    from dpformer.serving.ranking import Ranker
    from dpformer.serving.served import Served

_HOME = {
    "Access": "access",
    "Limits": "limits",
    "Ranker": "ranking",
    "Served": "served",
    "create_app": "app",
}

__all__ = ["Access", "Limits", "Ranker", "Served", "create_app"]

__getattr__ = lazy_names(__name__, _HOME)
