"""Ranks of the held-out item among *all* items. Metrics of ranks are in `metrics`.

The rank counts from 1. Ties are pessimistic: the target ranks after every item with the same score, so a model that
gives all items the same score is last, not first.
"""

import numpy as np
import torch
from torch import Tensor

from dpformer.errors import DpformerError

NEVER = 2**62  # the rank of an item that is never recommended, however long the list


class NonFiniteScores(DpformerError, ValueError):
    """Scores contain NaN or infinity, for which ranks are undefined."""


def ranks(scores: Tensor, targets: Tensor, *, seen: Tensor | None = None) -> Tensor:
    """The rank of each user's target among all items, from 1, ties pessimistic.

    Args:
        scores: (B, M), finite.
        targets: (B,) item numbers.
        seen: (B, M) bool, items of the history, which are not ranked; the target always is.

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
        raise NonFiniteScores("scores contain NaN or infinity; mask items with `seen`, not with -inf")
    of_target = scores.gather(1, targets[:, None])  # (B, 1)
    ahead = scores >= of_target  # (B, M), the target itself included
    if seen is not None:
        ahead &= ~seen
        ahead.scatter_(1, targets[:, None], True)
    # Counting is most of the work, and numpy counts bools twenty times as fast as torch.
    return torch.from_numpy(np.count_nonzero(ahead.cpu().numpy(), axis=1)).to(targets.device)
