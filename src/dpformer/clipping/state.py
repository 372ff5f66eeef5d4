"""Parameters and buffers are what they were when the forward pass began.

A forward pass that changes them carries one user's data into the next user's loss, and into the released model, past
clipping and noise: a running mean, a queue of past users, a renormalised table. What it keeps in other places (a Python
attribute) is not seen here; `dp.check` finds it by what it does to the losses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from itertools import compress

import torch
from torch import Tensor, nn

from dpformer.clipping.bits import Bits, bits_of_all, equal
from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.registered import Registered
from dpformer.clipping.torch_names import is_functorch_wrapped_tensor

LARGE = 1 << 26  # numbers; the contents of a larger model are compared only now and then
EVERY = 32

Mark = tuple[int, int, Bits | None]  # of a tensor: its memory, the count of its changes, the sum of its bits


class State:
    """The parameters and buffers found in a model, to be compared with later."""

    def __init__(self, found: Registered) -> None:
        self.found, self.tensors = found, found.all()
        size = sum(t.numel() for t in self.tensors.values())
        self.contents = size <= LARGE or random.SystemRandom().randrange(EVERY) == 0
        self.marks = self._marks(self.tensors.values())

    def _marks(self, tensors: Collection[Tensor]) -> list[Mark]:
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
        before = dict(zip(self.tensors, self.marks, strict=True))
        kept = {name: t for name, t in now.items() if self.tensors.get(name) is t}
        unchanged = dict(zip(kept, _same([before[name] for name in kept], self._marks(kept.values())), strict=True))
        if found is self.found and all(unchanged.values()):
            return
        for name, tensor in now.items():
            replaced = name not in kept
            if is_public(tensor) if replaced else unchanged[name]:
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


def _same(before: Sequence[Mark], now: Sequence[Mark]) -> list[bool]:
    bits = [(a[2], b[2]) for a, b in zip(before, now, strict=True)]
    known = [a is not None and b is not None for a, b in bits]
    told = iter(
        equal(
            [a for a, _ in compress(bits, known) if a is not None],
            [b for _, b in compress(bits, known) if b is not None],
        )
    )
    return [
        a[:2] == b[:2] and (next(told) if is_known else a[2] is b[2])
        for a, b, is_known in zip(before, now, known, strict=True)
    ]


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not is_functorch_wrapped_tensor(t)
