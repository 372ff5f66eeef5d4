"""`audit`: canaries through training as claimed, scores, a lower bound on ε, checks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from dpformer.accounting.arguments import delta_of, positive, sample_rate_of, whole
from dpformer.noise.mechanisms import INDEPENDENT, Noise
from dpformer.verification.audit.bound import check_size
from dpformer.verification.audit.checks import checks
from dpformer.verification.audit.observation import Mechanism
from dpformer.verification.audit.observer import Watch, observe
from dpformer.verification.audit.result import Audit, Part, conclude

if TYPE_CHECKING:
    from dpformer.training.distributed import Team

LEAST_STEPS = 4
TRAINING = "training"


def audit(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    clip_norm: float = 1.0,
    clipping: str = "normalize",
    noise: Noise = INDEPENDENT,
    canaries: int = 10_000,
    confidence: float = 0.95,
    seed: int | None = None,
    watch: Watch = iter,
    team: Team | None = None,
) -> Audit:
    """Train on canaries and compare what is revealed with the claim.

    >>> result = audit(noise_multiplier=3.2929, sample_rate=1024 / 6040, steps=590, delta=1 / 6040)  # doctest: +SKIP
    >>> result.verdict  # doctest: +SKIP
    'Consistent with the claim: ε of training is at least 4.7 with 95% confidence, and the claim is 5.'

    Args:
        noise_multiplier: the claimed σ.
        sample_rate: the claimed q.
        steps: the claimed T.
        delta: δ of the stated ε.
        clip_norm: C.
        clipping: "normalize" or "clip".
        noise: the claimed correlation of the noise.
        canaries: their number; half of them, by coin flips, take part. 10⁴ show about 93% of ε, 10⁵ about 98%.
        confidence: confidence level of the lower bound.
        seed: random seed, to repeat an audit.
        watch: receives the range of steps and yields them one by one, for progress bars.
        team: several processes led by this one; see `observe`.
    """
    began = time.monotonic()
    mechanism = mechanism_of(noise_multiplier, sample_rate, steps, clip_norm, clipping, noise)
    check_size(canaries, confidence)
    delta, member = delta_of(delta), np.random.default_rng(seed).random(canaries) < 0.5
    return conclude([training_part(mechanism, member, seed, watch, team)], member, delta, confidence, began)


def training_part(
    mechanism: Mechanism, member: np.ndarray, seed: int | None, watch: Watch = iter, team: Team | None = None
) -> Part:
    """Training on the canaries that take part."""
    with torch.random.fork_rng(devices=[]):
        seen = observe(mechanism, member, seed=seed, watch=watch, team=team)
    return Part(TRAINING, mechanism.claimed, mechanism, seen.scores, tuple(checks(seen)))


def mechanism_of(
    noise_multiplier: float, sample_rate: float, steps: int, clip_norm: float, clipping: str, noise: Noise
) -> Mechanism:
    """The claim, or a ValueError if it is impossible."""
    if clipping not in ("normalize", "clip"):
        raise ValueError(f"clipping is {clipping!r}; it must be normalize or clip")
    sample_rate = sample_rate_of(sample_rate)
    noise.step_rate(sample_rate)
    return Mechanism(
        noise_multiplier=positive("noise_multiplier", noise_multiplier),
        sample_rate=sample_rate,
        steps=_enough(steps, noise),
        noise=noise,
        clip_norm=positive("clip_norm", clip_norm),
        clipping=clipping,
    )


def _enough(steps: int, noise: Noise) -> int:
    if whole("steps", steps, 1) < (least := LEAST_STEPS * noise.groups) and noise.groups > 1:
        raise ValueError(f"steps is {steps}; an audit of {noise.name} needs {least}")
    return whole("steps", steps, LEAST_STEPS)
