"""Ranks: where the held-out item stands among *all* items. What follows from them is in `metrics`.

The rank counts from 1. Ties are pessimistic: the target stands after every item with the same score, so a model that
gives all items one score is last, not first.
"""

import numpy as np
import torch
from torch import Tensor

from dpformer.errors import DpformerError

NEVER = 2**62  # the rank of what is not recommended however long the list is


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
