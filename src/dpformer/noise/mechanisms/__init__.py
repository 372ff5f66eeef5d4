"""Mechanisms: how training noise is correlated across steps. One file each, registered by importing it here."""

from dpformer.noise.mechanisms.banded import Banded, BandedGaussian
from dpformer.noise.mechanisms.base import Noise, register
from dpformer.noise.mechanisms.history import NoiseHistory
from dpformer.noise.mechanisms.independent import INDEPENDENT, Independent
from dpformer.noise.mechanisms.registry import noise_of
from dpformer.noise.mechanisms.truncated import Truncated, TruncatedGaussian

__all__ = [
    "INDEPENDENT", "Banded", "BandedGaussian", "Independent", "Noise", "NoiseHistory", "Truncated", "TruncatedGaussian",
    "noise_of", "register",
]  # fmt: skip
