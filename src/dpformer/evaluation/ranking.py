"""Ranking metrics: where the held-out item stands among *all* items.

The rank counts from 1. Ties are pessimistic: the target stands after every item with the same score, so a model that
gives all items one score is last, not first. There is one relevant item a user, so with rank r

    NDCG@k = 1[r ≤ k] / log2(r + 1),   HIT@k = 1[r ≤ k],   MRR = 1 / r,

averaged over users.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpformer.errors import DpformerError

NEVER = 2**62  # the rank of what is not recommended however long the list is
FEW_VALUES = 256  # of a metric, for which how often each is drawn is drawn at once


class NonFiniteScores(DpformerError, ValueError):
    """Scores hold NaN or infinity, for which there is no honest rank."""


def ranks(scores: Tensor, targets: Tensor, *, seen: Tensor | None = None) -> Tensor:
    """The rank of each user's target among all items, from 1, ties pessimistic.

    Args:
        scores: (B, M), finite.
        targets: (B,) item numbers.
        seen: (B, M) bool, items that are not ranked because the user has met them; the target always is.

    Returns: (B,) int64.

    >>> ranks(torch.tensor([[0.3, 0.9, 0.3]]), torch.tensor([0]))
    tensor([3])
    """
    if scores.ndim != 2 or targets.shape != scores.shape[:1]:
        raise ValueError(
            f"scores must be (B, M) and targets (B,), not {tuple(scores.shape)} and {tuple(targets.shape)}"
        )
    if seen is not None and (seen.shape != scores.shape or seen.dtype != torch.bool):
        raise ValueError(f"seen must be bool of shape {tuple(scores.shape)}, not {seen.dtype} {tuple(seen.shape)}")
    if len(targets) and not (int(targets.min()) >= 0 and int(targets.max()) < scores.shape[1]):
        raise ValueError(f"a target lies outside 0..{scores.shape[1] - 1}")
    # aminmax keeps NaN, and takes a tenth of the time of isfinite().
    if scores.numel() and not all(torch.isfinite(end) for end in torch.aminmax(scores)):
        raise NonFiniteScores("scores hold NaN or infinity; items are masked with `seen`, never with -inf")
    of_target = scores.gather(1, targets[:, None])  # (B, 1)
    ahead = scores >= of_target  # (B, M), the target itself included
    if seen is not None:
        ahead &= ~seen
        ahead.scatter_(1, targets[:, None], True)
    # Counting is most of the work, and numpy counts bools twenty times as fast as torch.
    return torch.from_numpy(np.count_nonzero(ahead.cpu().numpy(), axis=1)).to(targets.device)


def hit(ranks: Tensor, k: int) -> Tensor:
    """HIT@k: the share of users whose target is among the first k. Mean over the last dimension, float64."""
    return (ranks <= _depth(ranks, k)).double().mean(dim=-1)


def ndcg(ranks: Tensor, k: int) -> Tensor:
    """NDCG@k with one relevant item: 1/log2(rank + 1) if rank ≤ k, else 0. Mean over the last dimension, float64."""
    gains = 1 / torch.log2(ranks.double() + 1)
    return torch.where(ranks <= _depth(ranks, k), gains, 0.0).mean(dim=-1)


def mrr(ranks: Tensor) -> Tensor:
    """Mean reciprocal rank, over all items. Mean over the last dimension, float64."""
    _depth(ranks, 1)
    return (1 / ranks.double()).mean(dim=-1)


def bootstrap(
    metric: Callable[[Tensor], Tensor], ranks: Tensor, *, confidence: float = 0.95, samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """A percentile confidence interval of a metric of ranks (U,): users are drawn again with replacement.

    The metric is a mean over users, so that each user's value is computed once. It says how much the value would move
    with other users; not how much with another training run.
    """
    _depth(ranks, 1)
    of_user = metric(ranks[:, None]).numpy()  # (U,): the mean of one
    values, counts = np.unique(of_user, return_counts=True)
    random = np.random.default_rng(seed)
    if len(values) <= FEW_VALUES:  # how often each value is drawn is multinomial: no user has to be drawn
        means = random.multinomial(len(of_user), counts / counts.sum(), samples) @ values / len(of_user)
    else:
        means = np.array([of_user[random.integers(0, len(of_user), len(of_user))].mean() for _ in range(samples)])
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail]).tolist()
    return low, high


def _depth(ranks: Tensor, k: int) -> int:
    if ranks.shape[-1] == 0:
        raise ValueError("there is no user to average over")
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    return k
