"""Banded noise: what a step adds is partly taken back in the next ones, so that sums of steps hold less of it.

Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (NeurIPS 2023). With z_t independent normal noise,
step t adds y_t, where C·y = z for a lower triangular Toeplitz matrix C of `bands` diagonals c_0 … c_{b−1}, ‖c‖ = 1:

    y_t = (z_t − Σ_{k=1}^{b−1} c_k·y_{t−k}) / c_0

What is released, sums g_t + σ·y_t, is as good as C·(g + σ·y) = C·g + σ·z. A user whose gradient enters step t changes
rows t … t+b−1 of C·g, by c, whose norm is 1: one Gaussian release of sensitivity 1. If a user takes part at most once
in any b steps in a row, these rows never overlap, and each time is a release of its own. So users are dealt at random
into b groups that take turns, and in its turn each user of a group is sampled independently with probability b·q: the
batch is as large as ever, and T steps cost ⌈T/b⌉ Poisson-sampled Gaussian releases at rate b·q.

Later gradients may depend on earlier releases: given a user's group and everybody else's draws, rows t … t+b−1 are a
centre that is known by then, plus c times what the user adds, if drawn, and that is fixed at step t. Groups are drawn,
each by itself, and a mixture over them is no easier to tell apart. It is more noise in each step and less in sums of
steps: for small q and large ε, up to a third less.

Coefficients are those of the square root of the matrix of prefix sums, 1, 1/2, 3/8, 5/16 …, cut off after b and scaled
to norm 1 (Fichtenberger et al. 2023; close to the best for long sums).
"""

import numpy as np

from dpformer.privacy.arguments import bands_of, whole


def coefficients(bands: int) -> np.ndarray:
    """(bands,) c of norm at most 1; [1] for one band, which is independent noise."""
    ks = np.arange(1, bands_of(bands))
    c = np.cumprod(np.concatenate([[1.0], (2 * ks - 1) / (2 * ks)]))
    c /= np.linalg.norm(c)
    return c if len(c) == 1 else c * (1 - 1e-12)  # rounding must not make the norm more than 1


def sum_deviation(bands: int, steps: int) -> float:
    """Deviation of the noise in the sum of all steps, in units of σ: √steps for one band.

    C·y = z in generating functions: prefix sums of y are z through 1 / ((1 − x)·Σ c_k x^k).
    """
    c = coefficients(bands)
    inverse = np.zeros(whole("steps", steps, 1))  # the first column of C⁻¹
    inverse[0] = 1 / c[0]
    for t in range(1, steps):
        reach = min(t, bands - 1)
        inverse[t] = -np.dot(c[1 : reach + 1], inverse[t - reach : t][::-1]) / c[0]
    return float(np.linalg.norm(np.cumsum(inverse)))
