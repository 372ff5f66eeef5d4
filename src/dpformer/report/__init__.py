"""The report of a run: one HTML page that works offline. Names are imported on first use, as they need torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.report.accuracy import measure
    from dpformer.report.page import write_report

_HOME = {"measure": "accuracy", "write_report": "page"}

__all__ = ["measure", "write_report"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.report.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpformer.report' has no attribute {name!r}")
