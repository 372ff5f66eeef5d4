"""What is promised: budget, ledger and accountant, Poisson sampling, secure noise."""

from dpformer.privacy.accounting import epsilon_of
from dpformer.privacy.calibration import calibrate
from dpformer.privacy.events import Event, Gaussian, PoissonGaussian
from dpformer.privacy.ledger import Ledger
from dpformer.privacy.mechanisms import Banded, BandedGaussian, Independent, Noise
from dpformer.privacy.randomness import SecureNoise, SecureRandom
from dpformer.privacy.sampling import PoissonBatches

__all__ = [
    "Banded",
    "BandedGaussian",
    "Event",
    "Gaussian",
    "Independent",
    "Ledger",
    "Noise",
    "PoissonBatches",
    "PoissonGaussian",
    "SecureNoise",
    "SecureRandom",
    "calibrate",
    "epsilon_of",
]
