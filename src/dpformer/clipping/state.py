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

from dpformer.clipping.bits import Bits, bits_of_all
from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.registered import Registered

LARGE = 1 << 26  # numbers; the contents of a larger model are compared only now and then
EVERY = 32


@dataclass(frozen=True)
class Known:
    """One tensor of the model as it was: the object, its memory, the count of its changes, the sum of its bits."""

    tensor: Tensor
    memory: int
    version: int
    bits: Bits | None

    def change(self, now: Known) -> str | None:
        """What has become of it."""
        if now.tensor is not self.tensor:
            return "was replaced"
        if (now.memory, now.version) != (self.memory, self.version):
            return "was written to"
        if self.bits is not None and now.bits is not None and not bool(now.bits == self.bits):
            return "was written to"
        return None


def _known(tensors: dict[str, Tensor], contents: bool) -> dict[str, Known]:
    plain = {n: t for n, t in tensors.items() if type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided}
    bits = dict(zip(plain, bits_of_all(list(plain.values())), strict=True)) if contents else {}
    return {
        name: Known(t, t.data_ptr() if name in plain else 0, 0 if t.is_inference() else t._version, bits.get(name))
        for name, t in tensors.items()
    }


class State:
    """The parameters and buffers found in a model, to be compared with later."""

    def __init__(self, found: Registered) -> None:
        self.found = found
        tensors = found.all()
        size = sum(t.numel() for t in tensors.values())
        self.contents = size <= LARGE or random.SystemRandom().randrange(EVERY) == 0
        self.known = _known(tensors, self.contents)

    def compare(self, found: Registered, is_public: Callable[[Tensor], bool]) -> None:
        """Raises if the forward pass has changed the model; a buffer may be made anew of public numbers."""
        now = _known(found.all(), self.contents)
        if found is self.found and not any(map(Known.change, self.known.values(), now.values())):
            return
        for name, after in now.items():
            before = self.known.get(name)
            change = "was made" if before is None else before.change(after)
            if change is None or (change in ("was made", "was replaced") and is_public(after.tensor)):
                continue
            kind = "parameter" if isinstance(after.tensor, nn.Parameter) else "buffer"
            raise UnsupportedUse(
                f"{kind} '{name}' {change} in the forward "
                f"pass: what it keeps of users would reach other users' losses and the released model, outside the "
                f"guarantee; keep no running statistics, queues or counts in the model"
            )
        if gone := sorted(set(self.known) - set(now)):
            raise UnsupportedUse(f"'{gone[0]}' was taken out of the model in the forward pass; leave it in")
