"""Sampling: which users are in which batch."""

from dpformer.sampling.batch import Batch, Part
from dpformer.sampling.poisson import PoissonBatches

__all__ = ["Batch", "Part", "PoissonBatches"]
