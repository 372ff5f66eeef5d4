"""Gradients written out: what biases, normalisation, positions and scales contribute."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpformer.clipping.products import add_sums, can_weigh


@dataclass
class Dense:
    """g_b itself, for parameters so small that a copy a user costs nothing."""

    grad: Tensor  # (B, *shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.grad.shape[1:])

    def part(self, a: int, b: int) -> Dense:
        return Dense(self.grad[a:b])

    def pick(self, users: Tensor) -> Dense:
        return Dense(self.grad[users])

    def dense(self) -> Tensor:
        return self.grad

    def add_to(self, out: Tensor) -> None:
        out += self.grad

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        grads = self.grad.reshape(len(c), -1)
        if can_weigh(grads, out):
            add_sums([(grads, out, True)], c)
        elif out.dtype == grads.dtype and out.is_contiguous():
            out.view(-1).addmv_(grads.T, c.to(grads.dtype))
        else:
            out += (c.to(grads.dtype) @ grads).reshape(self.shape)

    def keep(self, users: Tensor) -> None:
        self.grad = self.grad.masked_fill(~users.reshape(-1, *[1] * (self.grad.ndim - 1)), 0)
