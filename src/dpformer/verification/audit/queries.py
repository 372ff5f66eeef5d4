"""`audit_query`: canaries through a query itself, a lower bound on ε beside what the query claims, checks."""

from __future__ import annotations

import math
import time

import numpy as np

from dpformer.accounting.arguments import delta_of, positive
from dpformer.accounting.events import PoissonGaussian
from dpformer.queries.base import Query
from dpformer.verification.audit.bound import assumption_free, check_size, effective_noise, epsilon_at, guess
from dpformer.verification.audit.checks import (
    another_run,
    contribution_checks,
    distribution_checks,
    spread_check,
    told_apart,
)
from dpformer.verification.audit.observation import Mechanism
from dpformer.verification.audit.result import Audit


def audit_query(
    query: Query,
    *,
    noise_multiplier: float,
    delta: float,
    canaries: int = 10_000,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Audit:
    """Asks a query of canaries and compares what that gives away with one Gaussian event of `noise_multiplier`."""
    began = time.monotonic()
    check_size(canaries, confidence)
    sigma, delta = positive("noise_multiplier", noise_multiplier), delta_of(delta)
    member = np.random.default_rng(seed).random(query.canary_count(canaries)) < 0.5
    seen = query.canaries(sigma, member, seed)
    scores = (2 * seen.estimate - 1) / (2 * seen.deviation**2)
    claimed = PoissonGaussian(sigma, 1.0, 1)
    guesses = guess(scores, member, confidence)
    noise = effective_noise(guesses.error_at_most, claimed)
    added = seen.estimate[member]
    around = float(np.square((added - 1) / seen.deviation).sum())
    checks = [
        told_apart(guesses, claimed),
        *(spread_check(name, numbers) for name, numbers in seen.others.items()),
        *distribution_checks(seen.noise[:, ~member], sigma),
        *contribution_checks((float(added.mean()), seen.deviation / math.sqrt(len(added))), (around, len(added))),
    ]
    if seed is None:
        again = query.canaries(sigma, member, seed)
        checks.append(another_run(seen.noise[0, ~member], again.noise[0, ~member]))
    return Audit(
        mechanism=Mechanism(sigma, 1.0, 1),
        delta=delta,
        epsilon_claimed=epsilon_at(sigma, claimed, delta),
        epsilon_lower=epsilon_at(noise, claimed, delta),
        epsilon_lower_any=assumption_free(guesses.error_at_most, delta),
        effective_noise=noise,
        confidence=confidence,
        guesses=guesses,
        checks=tuple(checks),
        seconds=time.monotonic() - began,
        scores=scores,
        member=member,
        of=query.label,
    )
