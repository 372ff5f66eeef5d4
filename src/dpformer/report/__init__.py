"""The report of a run: one HTML page that works offline. Names are imported on first use, as they need torch."""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names

if TYPE_CHECKING:
    from dpformer.report.accuracy import measure
    from dpformer.report.comparison import compare
    from dpformer.report.comparison_page import write_comparison
    from dpformer.report.page import write_report

_HOME = {
    "compare": "comparison",
    "measure": "accuracy",
    "write_comparison": "comparison_page",
    "write_report": "page",
}

__all__ = ["compare", "measure", "write_comparison", "write_report"]

__getattr__ = lazy_names(__name__, _HOME)
