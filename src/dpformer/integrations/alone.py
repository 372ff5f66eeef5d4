"""Whether a user's loss is its own: computed alone it is the same number as in company.

The engine compares gradients with autograd, which cannot know that a *number* in a user's loss came from others: a
division by everybody's tokens, padding that is not masked, statistics of the batch. That shows when a user is computed
without the others. It is done on the first part of two users or more, and later at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpformer.clipping import UnsupportedUse
from dpformer.integrations.batches import Part

EVERY = 128  # parts from one look to the next, on average
LOOKED_AT = 4  # users of a part
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; half precision, or autocast: 5e-2


class AloneCheck:
    """Called with every part; looks at the first one that can be looked at, and then at one in `EVERY`."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.looked = model, False
        self._random = random.SystemRandom()

    def __call__(self, losses_of: Callable[[Part], Tensor], part: Part, rough: bool = False) -> None:
        """Raises `UnsupportedUse` if the loss of a user depends on who else is there. Dropout is off meanwhile."""
        if part.users < 2 or (self.looked and self._random.randrange(EVERY)):
            return
        self.looked = True
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                self._compare(losses_of, part, rough)
        finally:
            for module, mode in training.items():
                module.training = mode

    def _compare(self, losses_of: Callable[[Part], Tensor], part: Part, rough: bool) -> None:
        together = losses_of(part)
        tolerance = 5e-2 if rough else TOLERANCE.get(together.dtype, 5e-2)
        for user in self._random.sample(range(part.users), min(LOOKED_AT, part.users)):
            alone = losses_of(Part.of([part.collated[user]]).to(together.device))
            if not torch.allclose(alone, together[user], rtol=tolerance, atol=tolerance, equal_nan=True):
                raise UnsupportedUse(
                    f"a user's loss is {float(together[user]):.6g} among {part.users} users and {float(alone):.6g} "
                    "alone: it must depend on that user only. Look for a division by all tokens of the batch, padding "
                    "without a mask, statistics or negatives of the batch"
                )
