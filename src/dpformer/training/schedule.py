"""The learning rate at each step, a pure function of the step, so that resuming needs no state."""

import math


def warmup_then_decay(step: int, steps: int, warmup: float = 0.2) -> float:
    """The factor on the learning rate at step 0 … steps − 1: linear warm-up to 1, then linear decay towards 0.

    >>> [warmup_then_decay(t, 10, 0.2) for t in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.125]
    """
    rise = math.ceil(warmup * steps)
    if step < rise:
        return (step + 1) / rise
    return (steps - step) / (steps - rise)
