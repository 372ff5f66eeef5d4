"""`audit`: canaries through training as claimed, scores, a lower bound on ε, checks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from dpformer.privacy.arguments import delta_of, positive, sample_rate_of, whole
from dpformer.privacy.events import banded_rate
from dpformer.verification.audit.bound import assumption_free, check_size, effective_noise, epsilon_at, guess
from dpformer.verification.audit.checks import checks, told_apart
from dpformer.verification.audit.observation import Mechanism, Watch, observe
from dpformer.verification.audit.result import Audit

if TYPE_CHECKING:
    from dpformer.training.distributed import Team

LEAST_STEPS = 4


def audit(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    clip_norm: float = 1.0,
    clipping: str = "normalize",
    bands: int = 1,
    canaries: int = 10_000,
    confidence: float = 0.95,
    seed: int | None = None,
    watch: Watch = iter,
    team: Team | None = None,
) -> Audit:
    """Runs training on canaries and compares what it gives away with what is claimed.

    >>> result = audit(noise_multiplier=3.2929, sample_rate=1024 / 6040, steps=590, delta=1 / 6040)  # doctest: +SKIP
    >>> result.verdict  # doctest: +SKIP
    'Nothing speaks against the claim: ε of training is at least 4.7 with 95% confidence, and claimed is 5.'

    Args:
        noise_multiplier: σ, as claimed.
        sample_rate: q, as claimed.
        steps: T, as claimed.
        delta: δ at which ε is stated.
        clip_norm: C.
        clipping: "normalize" or "clip".
        bands: over how many steps noise is correlated, as claimed.
        canaries: how many; half of them, by the toss of coins, take part. 10⁴ show about 93% of ε, 10⁵ about 98%.
        confidence: of the lower bound.
        seed: to repeat an audit.
        watch: gets the range of steps and gives them back one by one, for progress bars.
        team: several processes, of which this one leads; see `observe`.
    """
    began = time.monotonic()
    mechanism = _mechanism(noise_multiplier, sample_rate, steps, clip_norm, clipping, bands)
    check_size(canaries, confidence)
    delta = delta_of(delta)
    with torch.random.fork_rng(devices=[]):
        seen = observe(mechanism, canaries, seed=seed, watch=watch, team=team)
    claimed = mechanism.event
    guesses = guess(seen.scores, seen.member, confidence)
    noise = effective_noise(guesses.error_at_most, claimed)
    return Audit(
        mechanism=mechanism,
        delta=delta,
        epsilon_claimed=epsilon_at(mechanism.noise_multiplier, claimed, delta),
        epsilon_lower=epsilon_at(noise, claimed, delta),
        epsilon_lower_any=assumption_free(guesses.error_at_most, delta),
        effective_noise=noise,
        confidence=confidence,
        guesses=guesses,
        checks=(told_apart(guesses, claimed), *checks(seen)),
        seconds=time.monotonic() - began,
        scores=seen.scores,
        member=seen.member,
    )


def _mechanism(
    noise_multiplier: float, sample_rate: float, steps: int, clip_norm: float, clipping: str, bands: int
) -> Mechanism:
    if clipping not in ("normalize", "clip"):
        raise ValueError(f"clipping is {clipping!r}; it must be normalize or clip")
    bands, sample_rate = whole("bands", bands, 1), sample_rate_of(sample_rate)
    banded_rate(sample_rate, bands)
    return Mechanism(
        noise_multiplier=positive("noise_multiplier", noise_multiplier),
        sample_rate=sample_rate,
        steps=_enough(steps, bands),
        bands=bands,
        clip_norm=positive("clip_norm", clip_norm),
        clipping=clipping,
    )


def _enough(steps: int, bands: int) -> int:
    if bands > 1 and whole("steps", steps, 1) < LEAST_STEPS * bands:
        raise ValueError(f"steps is {steps}; an audit of noise correlated over {bands} needs {LEAST_STEPS * bands}")
    return whole("steps", steps, LEAST_STEPS)
