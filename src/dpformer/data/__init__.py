"""From interactions to one sequence per user: readers, vocabulary, split, packing, and the synthetic data set."""

from dpformer.data.attributes import Attributes
from dpformer.data.cache import load, save
from dpformer.data.catalog import read_catalog
from dpformer.data.columns import Columns
from dpformer.data.dataset import Dataset
from dpformer.data.filters import Filters
from dpformer.data.histories import Histories, read
from dpformer.data.interactions import Interactions
from dpformer.data.prepare import prepare
from dpformer.data.reading import Reading
from dpformer.data.sources.frames import from_frame
from dpformer.data.synthetic import synthetic
from dpformer.data.vocabulary import Vocabulary

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
