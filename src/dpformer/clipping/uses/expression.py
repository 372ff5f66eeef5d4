"""Uses of expressions of parameters: `weight[:T]`, `scale.exp()`, `A @ B`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from dpformer.clipping.recording import Source
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
        each = [s.part(a, b).dense() for s in self.sources]
        return Dense(self._pull(each[0] if len(each) == 1 else torch.stack(each).sum(0), batched=True))

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
        read = read_ids(self.z, self.parameter)
        if read is not None:
            return widened(_spread(grads, *read, self.parameter))
        try:
            (out,) = torch.autograd.grad(self.z, self.parameter, grads, retain_graph=True, is_grads_batched=True)
        except RuntimeError:  # an autograd function of the model's own that cannot be batched
            each = [torch.autograd.grad(self.z, self.parameter, g, retain_graph=True)[0] for g in grads]
            out = torch.stack(each)
        return widened(out)


def read_ids(z: Tensor, table: Tensor) -> tuple[Tensor, bool] | None:
    """What rows z is, if it is nothing but rows of the table, as positions are: the same for every user.

    Also whether they are the first rows, in order. On a device, which would have to be waited for, nothing is looked
    at.
    """
    if not z.is_cpu:
        return None
    node = z.grad_fn
    if node is None or node.name() != "EmbeddingBackward0" or z._backward_hooks:
        return None
    made_of: Any = node.next_functions[0][0]
    padding, by_frequency = (getattr(node, f"_saved_{name}") for name in ("padding_idx", "scale_grad_by_freq"))
    if getattr(made_of, "variable", None) is not table or by_frequency or 0 <= padding < len(table):
        return None
    ids = cast(Tensor, getattr(node, "_saved_indices"))  # noqa: B009
    # Hooks on the node or on the table show themselves only in what they do.
    ones = torch.ones_like(z)
    (pulled,) = torch.autograd.grad(z, table, ones, retain_graph=True)
    if pulled.layout != torch.strided:
        return None
    flat = ids.flatten()
    expected = _spread(ones[None], ids, False, table)[0]
    is_first = torch.equal(flat, torch.arange(len(flat), dtype=ids.dtype))
    return (ids, is_first) if torch.equal(pulled, expected) else None


def _spread(grads: Tensor, ids: Tensor, first: bool, table: Tensor) -> Tensor:
    """(B, *ids, d) → (B, M, d): rows where they were read; batched autograd takes several times as long."""
    rows = grads.reshape(len(grads), ids.numel(), table.shape[1])
    if first and ids.numel() == len(table):
        return rows
    out = rows.new_zeros(len(rows), *table.shape)
    if first:
        out[:, : ids.numel()] = rows
        return out
    return out.index_add_(1, ids.flatten(), rows)


def widened(t: Tensor) -> Tensor:
    """Half precision is for matrices of the model, not for sums over users."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
