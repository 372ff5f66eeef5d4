"""Mechanisms: how the noise of training behaves from step to step. Each is one file; importing it here registers it."""

from dpformer.noise.mechanisms.banded import Banded, BandedGaussian
from dpformer.noise.mechanisms.base import Noise, register
from dpformer.noise.mechanisms.history import NoiseHistory
from dpformer.noise.mechanisms.independent import INDEPENDENT, Independent
from dpformer.noise.mechanisms.registry import noise_of

__all__ = ["INDEPENDENT", "Banded", "BandedGaussian", "Independent", "Noise", "NoiseHistory", "noise_of", "register"]
