"""`audit_query`: canaries through a query itself, a lower bound on ε compared with its claim, and checks."""

from __future__ import annotations

import time

import numpy as np

from dpformer.accounting.arguments import delta_of, positive
from dpformer.accounting.events import Gaussian
from dpformer.queries.base import Query
from dpformer.verification.audit.bound import check_size
from dpformer.verification.audit.checks import (
    alone_check,
    another_run,
    contribution_checks,
    distribution_checks,
    spread_check,
)
from dpformer.verification.audit.observation import Contribution, Mechanism
from dpformer.verification.audit.result import Audit, Part, conclude


def audit_query(
    query: Query,
    *,
    noise_multiplier: float,
    delta: float,
    failure: float = 0.0,
    canaries: int = 10_000,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Audit:
    """Run a query on canaries and compare what it reveals with one Gaussian event of `noise_multiplier`.

    Args:
        query: a query of a run.
        noise_multiplier: the claimed noise multiplier.
        delta: δ of the stated ε.
        failure: the query's outright failure probability, such as that of the threshold of a released list.
        canaries: minimum number; half of them, by coin flips, take part.
        confidence: confidence level of the lower bound.
        seed: random seed, to repeat an audit.
    """
    began = time.monotonic()
    check_size(canaries, confidence)
    event = Gaussian(positive("noise_multiplier", noise_multiplier), label=query.label, delta=failure)
    member = np.random.default_rng(seed).random(query.canary_count(canaries)) < 0.5
    return conclude([query_part(query, event, member, seed)], member, delta_of(delta), confidence, began)


def query_part(query: Query, event: Gaussian, member: np.ndarray, seed: int | None) -> Part:
    """A query run on the canaries that take part."""
    sigma, seen = event.noise_multiplier, query.canaries(event, member, seed)
    checks = [
        *(spread_check(name, numbers) for name, numbers in seen.others.items()),
        *distribution_checks(seen.noise, sigma),
    ]
    groups = {"one user": member, **({} if seen.many is None else {"one user with many cells": member & seen.many})}
    for of, taking_part in groups.items():
        added = Contribution()
        added.add(seen.estimate[taking_part])
        checks += contribution_checks(added, seen.deviation, of)
    if seen.alone is not None:
        checks.append(alone_check(*seen.alone))
    if seed is None:
        checks.append(another_run(seen.noise[0], query.canaries(event, member, seed).noise[0]))
    scores = (2 * seen.estimate - 1) / (2 * seen.deviation**2)
    return Part(query.label, event, Mechanism(sigma, 1.0, 1), scores, tuple(checks))
