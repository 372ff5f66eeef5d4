"""Parameters and buffers are what they were when the forward pass began.

A forward pass that changes them carries one user's data into the next user's loss, and into the released model, past
clipping and noise: a running mean, a queue of past users, a renormalised table. What it keeps in other places (a Python
attribute) is not seen here; `dp.check` finds it by what it does to the losses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from itertools import compress

import torch
from torch import Tensor, nn

from dpformer.clipping.bits import Bits, bits_of_all
from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.registered import Registered
from dpformer.clipping.torch_names import is_functorch_wrapped_tensor

LARGE = 1 << 26  # numbers; the contents of a larger model are compared only now and then
EVERY = 32


class State:
    """The parameters and buffers found in a model, to be compared with later."""

    def __init__(self, found: Registered) -> None:
        self.found, self.tensors = found, found.all()
        size = sum(t.numel() for t in self.tensors.values())
        self.contents = size <= LARGE or random.SystemRandom().randrange(EVERY) == 0
        self.marks = self._marks(self.tensors.values())

    def _marks(self, tensors: Collection[Tensor]) -> list[tuple[int, int, Bits | None]]:
        """Of each tensor: its memory, the count of its changes, the sum of its bits."""
        plain = [_is_plain(t) for t in tensors]
        bits = iter(bits_of_all(list(compress(tensors, plain))) if self.contents else [])
        return [
            (
                t.data_ptr() if is_plain else 0,
                0 if t.is_inference() else t._version,
                next(bits, None) if is_plain else None,
            )
            for t, is_plain in zip(tensors, plain, strict=True)
        ]

    def compare(self, found: Registered, is_public: Callable[[Tensor], bool]) -> None:
        """Raises if the forward pass has changed the model; a buffer may be made anew of public numbers."""
        now = found.all()
        marks = self._marks(now.values())
        if found is self.found and marks == self.marks:
            return
        before = dict(zip(self.tensors, self.marks, strict=True))
        for (name, tensor), mark in zip(now.items(), marks, strict=True):
            replaced = self.tensors.get(name) is not tensor
            if before.get(name) == mark if not replaced else is_public(tensor):
                continue
            change = "was written to" if not replaced else "was replaced" if name in before else "was made"
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise UnsupportedUse(
                f"{kind} '{name}' {change} in the forward "
                f"pass: what it keeps of users would reach other users' losses and the released model, outside the "
                f"guarantee; keep no running statistics, queues or counts in the model"
            )
        if gone := sorted(set(self.tensors) - set(now)):
            raise UnsupportedUse(f"'{gone[0]}' was taken out of the model in the forward pass; leave it in")


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not is_functorch_wrapped_tensor(t)
