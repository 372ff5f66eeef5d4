"""Mechanisms: how the noise of training behaves from step to step. Each is one file; importing it here registers it."""

from dpformer.privacy.mechanisms.banded import Banded, BandedGaussian
from dpformer.privacy.mechanisms.base import Noise, register
from dpformer.privacy.mechanisms.independent import INDEPENDENT, Independent
from dpformer.privacy.mechanisms.past import PastNoise
from dpformer.privacy.mechanisms.registry import noise_of

__all__ = ["INDEPENDENT", "Banded", "BandedGaussian", "Independent", "Noise", "PastNoise", "noise_of", "register"]
