"""The effective error: the noise of each parameter after a DP step (paper, Definition 4.1, Claim 4.2)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class EffectiveError(NamedTuple):
    """Standard deviations (not variances) of the parameters."""

    items: Tensor  # (M,) of each coordinate of item i's embedding row
    weights: Tensor  # () of every other parameter


def effective_error(
    noise_multiplier: float, expected_batch_size: float, frequencies: Tensor, *, scale: float = 1.0
) -> EffectiveError:
    """σ_eff = scale·σ/(B·p_i) for the embedding of item i, scale·σ/B for every other parameter.

    σ is `noise_multiplier`, B `expected_batch_size`, and p_i = `frequencies[i]` the probability that item i occurs in a
    user's history (document frequency, not a share of all tokens): B·p_i is the expected number of users in a batch who
    have item i. p must be public or released with DP. An item with p_i = 0 is treated as being as rare as the rarest
    item with a frequency (and B·p_i = 1 if none has one), so that every error is finite.

    The paper's definition is the noise of one averaged *gradient*. How far it moves a *parameter* depends on optimizer,
    learning rate and steps; that unknown factor is `scale`, 1 in the paper.

    >>> import torch
    >>> effective_error(2.0, 100, torch.tensor([0.5, 0.02, 0.0]))
    EffectiveError(items=tensor([0.0400, 1.0000, 1.0000]), weights=tensor(0.0200))
    """
    for name, value in (("noise_multiplier", noise_multiplier), ("scale", scale)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; it must be a finite number, 0 or more")
    if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
        raise ValueError(f"expected_batch_size is {expected_batch_size}; it must be a finite number above 0")
    p = frequencies.detach()
    if not p.is_floating_point() or p.ndim != 1:
        raise ValueError(f"frequencies are {p.dtype} of shape {tuple(p.shape)}; give one float per item, shape (M,)")
    if not bool(((p >= 0) & (p <= 1)).all()):
        worst = p[~((p >= 0) & (p <= 1))][0].item()
        raise ValueError(f"a frequency is {worst}; give probabilities in [0, 1]: users with the item / all users")
    seen = p[p > 0]
    floor = seen.min() if len(seen) else p.new_tensor(1 / expected_batch_size)
    weights = p.new_tensor(scale * noise_multiplier / expected_batch_size)
    return EffectiveError(weights / p.clamp(min=floor), weights)


def adam_error(rates: Sequence[float], num_items: int, *, scale: float = 1.0) -> EffectiveError:
    """σ_eff = scale·√(Σ_t rate_t²) for every parameter: how far the noise of all steps moves it under Adam.

    Adam divides a gradient by its root mean square. If that is mostly noise (nearly everywhere in DP training), a step
    moves a parameter by rate_t times a unit normal, regardless of σ, B and the frequency of the item; and steps add up
    in squares. For a comparison with the deviation of trained rows over noise draws see `experiments/distraction.py`.

    >>> adam_error([0.03, 0.04], 2)
    EffectiveError(items=tensor([0.0500, 0.0500]), weights=tensor(0.0500))
    """
    weights = torch.tensor(scale * math.hypot(*rates))
    return EffectiveError(weights.expand(num_items).clone(), weights)
