"""The learning rate at each step, a pure function of the step: nothing to save, nothing to lose on resume."""

import math


def warmup_then_decay(step: int, steps: int, warmup: float = 0.2) -> float:
    """The factor on the learning rate at step 0 … steps − 1: a linear rise to 1, then a linear fall towards 0.

    >>> [warmup_then_decay(t, 10, 0.2) for t in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.125]
    """
    rise = math.ceil(warmup * steps)
    if step < rise:
        return (step + 1) / rise
    return (steps - step) / (steps - rise)


def average_weight(step: int, steps: int) -> float:
    """The weight of the iterate after step 0 … steps − 1 in the running average of iterates.

    average ← (1 − w)·average + w·iterate with w = max(10/T, 9/(t + 10)), at most 1: an exponential average over about
    the last tenth of the run, over fewer steps while there are few. The first iterate replaces the initial values.
    """
    if step == 0:
        return 1.0
    return min(1.0, max(10 / steps, 9 / (step + 10)))
