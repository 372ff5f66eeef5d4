"""Uses of expressions of parameters: `weight[:T]`, `scale.exp()`, `A @ B`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dpformer.clipping.recorded_call import Source
from dpformer.clipping.uses import Dense


@dataclass
class Expression:
    """A use of an expression of parameters, z = f(p): g_p = Jᵀ g_z, with J the same for every user.

    Jᵀ is one call of autograd on f alone, batched over users.
    """

    z: Tensor
    parameter: Tensor
    sources: list[Source]
    computes_anew = True  # `add_sum` rounds otherwise than `part`, in bfloat16 over all users together

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def numbers_each(self) -> int:
        return prod(self.shape) + prod(self.z.shape) + sum(getattr(s, "numbers_each", 0) for s in self.sources)

    def part(self, a: int, b: int) -> Dense:
        grads = torch.stack([s.part(a, b).dense() for s in self.sources]).sum(0)
        return Dense(self._pull(grads, batched=True))

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        grads = torch.zeros(self.z.shape, dtype=torch.promote_types(self.z.dtype, torch.float32), device=c.device)
        for source in self.sources:
            source.add_sum(c.to(grads.real.dtype), grads)
        out += self._pull(grads, batched=False)

    def keep(self, users: Tensor) -> None:
        for source in self.sources:
            source.keep(users)

    def _pull(self, grads: Tensor, batched: bool) -> Tensor:
        grads = grads.to(self.z.dtype)
        if not batched:
            return widened(torch.autograd.grad(self.z, self.parameter, grads, retain_graph=True)[0])
        try:
            (out,) = torch.autograd.grad(self.z, self.parameter, grads, retain_graph=True, is_grads_batched=True)
        except RuntimeError:  # an autograd function of the model's own that cannot be batched
            each = [torch.autograd.grad(self.z, self.parameter, g, retain_graph=True)[0] for g in grads]
            out = torch.stack(each)
        return widened(out)


def widened(t: Tensor) -> Tensor:
    """Half precision is for matrices of the model, not for sums over users."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
