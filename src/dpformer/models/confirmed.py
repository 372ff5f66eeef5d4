r"""Whether released counts are more than noise: their share that the last round, drawn after all selection, confirms.

Pairs are selected by noisy counts, so the noise of those that stay is not zero on average: in a small log nearly all of
what stays may be noise. The last round of a release is drawn after the last selection. With S' the totals of all
earlier rounds, sd' their standard deviation, A the pairs with S' > 1.5·sd' and x the totals of the last round alone,

    share = Σ_A x / Σ_A (S' − 1.5·sd')

compares the same pairs under fresh noise. On logs with thousands of users it is 0.3 to 1, and its size says little
about accuracy; near 0 the counts are noise. So counts are multiplied by clip(4·share, 0, 1). Post-processing of a
release, so it is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dpformer.queries.transitions.rounds import TransitionRelease

CLAIMED = 1.5  # standard deviations subtracted
ENOUGH = 0.25  # confirmed share from which counts are taken as they are


def confirmation(release: TransitionRelease) -> float:
    """The factor, from 0 to 1; 1 for a release without noise, or without its last round."""
    from dpformer.queries.transitions.rounds import ROUNDS

    last = release.rounds[-1] if release.rounds else None
    if release.total_deviation == 0 or last is None or last.number != len(ROUNDS) - 1:
        return 1.0
    directed = sum(this.directed for this in ROUNDS)
    last_precision = 1 / (directed * release.difference_deviation**2)  # of x, whose variance is twice that of a cell
    precision = release.total_deviation**-2 - last_precision
    fresh = last.noisy.reshape(-1, 2).sum(1)
    earlier = (release.total * release.total_deviation**-2 - fresh * last_precision) / precision
    claimed = np.maximum(earlier - CLAIMED * precision**-0.5, 0)
    return float(np.clip(fresh[claimed > 0].sum() / max(ENOUGH * claimed.sum(), 1e-300), 0, 1))
