"""Sampling: which users are in which batch."""

from dpformer.sampling.poisson import PoissonBatches

__all__ = ["PoissonBatches"]
