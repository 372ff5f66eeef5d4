"""Parameters and buffers are what they were when the forward pass began.

A forward pass that changes them carries one user's data into the next user's loss, and into the released model, past
clipping and noise: a running mean, a queue of past users, a renormalised table. What it keeps in other places (a Python
attribute) is not seen here; `dp.check` finds it by what it does to the losses.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpformer.clipping.bounded import bits_of
from dpformer.clipping.errors import UnsupportedUse

LARGE = 1 << 26  # numbers; the contents of a larger model are compared only now and then
EVERY = 32


@dataclass(frozen=True)
class Known:
    """One tensor of the model as it was: the object, its memory, the count of its changes, the sum of its bits."""

    tensor: Tensor
    memory: int
    version: int
    bits: Tensor | None

    @staticmethod
    def of(tensor: Tensor, contents: bool) -> Known:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        memory = tensor.data_ptr() if plain else 0
        version = 0 if tensor.is_inference() else tensor._version
        return Known(tensor, memory, version, bits_of(tensor) if plain and contents else None)

    def change(self, now: Tensor) -> str | None:
        """What has become of it."""
        if now is not self.tensor:
            return "was replaced"
        after = Known.of(now, self.bits is not None)
        if (after.memory, after.version) != (self.memory, self.version):
            return "was written to"
        if self.bits is not None and after.bits is not None and not bool(after.bits == self.bits):
            return "was written to"
        return None


class State:
    """The parameters and buffers of a model, to be compared with later."""

    def __init__(self, model: nn.Module) -> None:
        named = _named(model)
        size = sum(t.numel() for t in named.values())
        contents = size <= LARGE or random.SystemRandom().randrange(EVERY) == 0
        self.known = {name: Known.of(t, contents) for name, t in named.items()}

    def compare(self, model: nn.Module, is_public: Callable[[Tensor], bool]) -> None:
        """Raises if the forward pass has changed the model; a buffer may be made anew of public numbers."""
        now = _named(model)
        for name, tensor in now.items():
            before = self.known.get(name)
            change = "was made" if before is None else before.change(tensor)
            if change is None or (change in ("was made", "was replaced") and is_public(tensor)):
                continue
            raise UnsupportedUse(
                f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} '{name}' {change} in the forward "
                f"pass: what it keeps of users would reach other users' losses and the released model, outside the "
                f"guarantee; keep no running statistics, queues or counts in the model"
            )
        if gone := sorted(set(self.known) - set(now)):
            raise UnsupportedUse(f"'{gone[0]}' was taken out of the model in the forward pass; leave it in")


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
