"""From interactions to one sequence per user: readers, vocabulary, split, packing, and the synthetic data set.

Names are imported on first use, so that the options of this room (`options.py`) load neither NumPy nor DuckDB.
"""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names

if TYPE_CHECKING:
    from dpformer.data.attributes import Attributes
    from dpformer.data.cache import load, save
    from dpformer.data.catalog import read_catalog
    from dpformer.data.columns import Columns
    from dpformer.data.dataset import Dataset
    from dpformer.data.filters import Filters
    from dpformer.data.histories import Histories, read
    from dpformer.data.interactions import Interactions
    from dpformer.data.preparation import prepare
    from dpformer.data.reading import Reading
    from dpformer.data.sources.frames import from_frame
    from dpformer.data.synthetic_data import synthetic
    from dpformer.data.vocabulary import Vocabulary

_HOME = {
    "Attributes": "attributes",
    "Columns": "columns",
    "Dataset": "dataset",
    "Filters": "filters",
    "Histories": "histories",
    "Interactions": "interactions",
    "Reading": "reading",
    "Vocabulary": "vocabulary",
    "from_frame": "sources.frames",
    "load": "cache",
    "prepare": "preparation",
    "read": "histories",
    "read_catalog": "catalog",
    "save": "cache",
    "synthetic": "synthetic_data",
}

__all__ = [
    "Attributes",
    "Columns",
    "Dataset",
    "Filters",
    "Histories",
    "Interactions",
    "Reading",
    "Vocabulary",
    "from_frame",
    "load",
    "prepare",
    "read",
    "read_catalog",
    "save",
    "synthetic",
]

__getattr__ = lazy_names(__name__, _HOME)
