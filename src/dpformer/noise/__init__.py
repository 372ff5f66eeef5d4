"""Noise: secure random numbers, mechanisms (independent, banded), and sums rounded to a public grid."""

from dpformer.noise.mechanisms import Banded, BandedGaussian, Independent, Noise
from dpformer.noise.randomness import SecureNoise, SecureRandom

__all__ = ["Banded", "BandedGaussian", "Independent", "Noise", "SecureNoise", "SecureRandom"]
