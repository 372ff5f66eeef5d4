"""ε of truncated Poisson batches by the standalone verifier's accountant, which shares no code with ours: for tests."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from dpformer.verification import standalone
from dpformer.verification.standalone import _between


@dataclass(frozen=True)
class TruncatedEvent:
    """An event of `standalone`, of whose users a random subset of `most` is kept."""

    sigma: float
    q: float
    releases: int
    most: int
    population: int
    failure: float = 0.0
    sampled: bool = True

    @property
    def truncation(self) -> tuple[float, float]:
        """The probability that at least `most` of the others are drawn, and of the user's being kept, given that."""
        others = self.population - 1
        drawn = np.arange(self.most, others + 1)
        chances = binom.pmf(drawn, others, self.q)
        total = float(chances.sum())
        return (min(1.0, total), float((chances * self.q * self.most / (drawn + 1)).sum()) / total) if total else (0, 0)

    def losses(self, h: float, removed: bool) -> tuple[int, np.ndarray]:
        """Whether others fill a batch does not depend on the data; where they do, the user replaces another."""
        truncated, kept = self.truncation
        first, chances = standalone.Event(self.sigma, self.q, 1).losses(h, removed)
        if not truncated:
            return first, chances
        start, replaced = _of_replacing(self.sigma, kept, h)
        low = min(first, start)
        both = np.zeros(max(first + len(chances), start + len(replaced)) - low)
        both[first - low : first - low + len(chances)] += (1 - truncated) * chances
        both[start - low : start - low + len(replaced)] += truncated * replaced
        return low, both

    def renyi(self, order: float) -> float:
        """Not amplified if the batch was full; which of both it was may be known."""
        plain, (truncated, _) = standalone.Event(self.sigma, self.q, 1).renyi(order), self.truncation
        if not truncated:
            return plain
        less, whole = order - 1, math.log(truncated) + (order - 1) * order / (2 * self.sigma**2)
        amplified = math.log1p(-truncated) + less * plain if truncated < 1 else -math.inf
        return float(np.logaddexp(amplified, whole)) / less


def _of_replacing(sigma: float, p: float, h: float) -> tuple[int, np.ndarray]:
    """(1 − p)·N(0, σ²) + p·N(2, σ²) against the same with −2: the same in both directions."""
    k = p * math.exp(-2 / sigma**2)

    def loss(x: float) -> float:
        return float(
            np.logaddexp(np.log1p(-p), math.log(k) + 2 * x / sigma**2)
            - np.logaddexp(np.log1p(-p), math.log(k) - 2 * x / sigma**2)
        )

    last = math.ceil(loss(2 + 10 * sigma) / h)
    above = np.expm1(h * np.arange(last + 1)) * (1 - p)  # the inverse of `loss`: a quadratic equation in e^(2x/σ²)
    half = sigma**2 / 2 * np.log((above + np.sqrt(above**2 + 4 * k**2 * np.exp(h * np.arange(last + 1)))) / (2 * k))
    x = np.concatenate([-half[:0:-1], half])
    near, far = _between(x / sigma), (_between((x - 2) / sigma), _between((x + 2) / sigma))
    one, other = (1 - p) * near + p * far[0], (1 - p) * near + p * far[1]
    up = np.clip((one - other * np.exp(h * np.arange(-last, last))) / -math.expm1(-h), 0, one)
    chances = np.zeros(len(one) + 1)
    chances[1:] += up
    chances[:-1] += one - up
    return -last, chances


def epsilon_of(event: TruncatedEvent, delta: float) -> float:
    """The smaller of both bounds: Rényi is tighter where batches are often truncated."""
    divergences = [event.releases * event.renyi(order) for order in standalone.ORDERS]
    return min(standalone.curve_of([event], delta)[1], standalone.epsilon_by_renyi(divergences, delta))  # type: ignore[list-item]
