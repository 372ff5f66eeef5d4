"""`dp.check` for the adapters: the losses of the users of a part, computed individually, in halves and together.

It is on in every adapter: at the first part with two users or more, and later at random, once in 128 parts, so that
mixing that starts later is found. Mixing of a user's own examples is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from dpformer.clipping.isolation import Check
from dpformer.integrations.batches import Part

LossesOf = Callable[[Part], Tensor]


class UsersCheck:
    """Called with every part, before its forward pass is recorded.

    Args:
        model: the model, which must remain unchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.looked = model, False

    def __call__(self, losses_of: LossesOf, part: Part) -> None:
        """Raise `UnsupportedUse` if the loss or gradient of a user depends on other users."""
        if part.users < 2:
            return
        check = Check(partial(_losses, self.model, losses_of, part))
        everybody = range(part.users)
        if self.looked:
            check(everybody)
        else:
            check.now(everybody)
            self.looked = True


def _losses(model: nn.Module, losses_of: LossesOf, part: Part, users: Sequence[int]) -> Tensor:
    """The model is passed so that the check sees whether it changes."""
    return losses_of(part.some(users))
