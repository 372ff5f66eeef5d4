"""Accounting: from a budget (ε, δ) to a noise multiplier, and from a ledger of events to ε."""

from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.attack_rates import AttackRates, attack_rates
from dpformer.accounting.calibration import calibrate
from dpformer.accounting.events import Event, Gaussian, PoissonGaussian
from dpformer.accounting.ledger import Ledger

__all__ = ["AttackRates", "Event", "Gaussian", "Ledger", "PoissonGaussian", "attack_rates", "calibrate", "epsilon_of"]
