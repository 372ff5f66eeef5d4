"""Noise: secure random numbers, mechanisms (independent, banded, truncated), and sums rounded to a public grid."""

from dpformer.noise.mechanisms import Banded, BandedGaussian, Independent, Noise, Truncated, TruncatedGaussian
from dpformer.noise.randomness import SecureNoise, SecureRandom

__all__ = [
    "Banded", "BandedGaussian", "Independent", "Noise", "SecureNoise", "SecureRandom", "Truncated", "TruncatedGaussian",
]  # fmt: skip
