"""Linear layers and matrix products: y = x Wᵀ + b, x @ W, W @ x, addmm.

Per user b, with rows t: ∂/∂W of x Wᵀ is Σ_t δ_bt ⊗ x_bt, of x @ W it is Σ_t x_bt ⊗ δ_bt (δ the gradient at y).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.gate import Gate
from dpformer.clipping.recorded_call import fresh, paired
from dpformer.clipping.rules.any_function import any_function
from dpformer.clipping.rules.broadcast import per_row
from dpformer.clipping.rules.registry import rule
from dpformer.clipping.user_rows import UserRows
from dpformer.clipping.uses import Dense, Outer


def flat(rows: UserRows, t: Tensor) -> Tensor:
    """(rows, …, d) → (B, T, d) with everything between first and last dimension taken as positions."""
    t = rows.spread(t)
    return t.reshape(t.shape[0], -1, t.shape[-1])


def outer(weight: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Outer]:
    """The use of a weight (or of its transpose: then the sides change places on the parameter itself)."""
    owner = getattr(weight, "_phantom_transpose_of", None)
    if owner is not None:
        return owner, Outer(right, left, tuple(owner.shape))
    return weight, Outer(left, right, tuple(weight.shape))


@rule(F.linear)
def linear(gate: Gate, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input Wᵀ + b."""
    x = input
    if gate.is_managed(x) or x.ndim < 2 or weight.ndim != 2:
        raise gate.refusal(weight if gate.is_managed(weight) else x, func, "give it an input with a batch dimension")
    if bias is not None and gate.is_managed(bias) and bias.shape != weight.shape[:1]:
        raise gate.refusal(bias, func, "give it a number for each output")
    trained, trained_bias = weight if gate.is_managed(weight) else None, bias if gate.is_managed(bias) else None
    managed = [p for p in (trained, trained_bias) if p is not None]
    source = x.detach()

    def replay(*fresh: Tensor) -> Tensor:
        w, b = gate.fill(fresh, weight, bias)
        return F.linear(source, w, b)

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        delta = flat(rows, grad)
        uses: list[tuple[Tensor, Any]] = []
        if trained is not None:
            uses.append(outer(trained, delta, flat(rows, source.to(grad.dtype))))
        if trained_bias is not None:
            uses.append((trained_bias, Dense(delta.sum(1))))
        return uses

    values = weight if trained is None else trained.detach(), bias if trained_bias is None else trained_bias.detach()
    out = fresh(F.linear(x, *values))
    return gate.record(func, managed, paired(replay), build, out, rows=x, reads=[source])


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul)
def matmul(gate: Gate, func: Any, input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x @ W and W @ x; a weight with batch dimensions of its own (heads) is copied to each user first."""
    a, b = input, other
    if gate.is_managed(a) and gate.is_managed(b):
        raise gate.refusal(a, func, "keep one factor free of parameters")
    weight = a if gate.is_managed(a) else b
    if out is not None:
        raise gate.refusal(weight, func, "leave out= away")
    if weight is b and weight.ndim == 2 and a.ndim >= 2:
        return _times_weight(gate, func, a, weight)
    x = b if weight is a else a
    if weight.ndim == 2 and x.ndim >= 3:  # W @ x = (xᵀ @ Wᵀ)ᵀ
        with gate:
            return torch.matmul(x.mT, weight.mT).mT.contiguous()  # as torch gives it, for the model may view it
    if weight is b and weight.ndim == 1 and a.ndim >= 2:
        with gate:
            return (a * weight).sum(-1)
    if weight.ndim >= 3 and x.ndim >= 3:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        copy = per_row(gate, func, weight, (*batch, *weight.shape[-2:]), x)
        return torch.matmul(copy, b) if weight is a else torch.matmul(a, copy)
    raise gate.refusal(weight, func, "give it an input whose first dimension is the batch")


@rule(torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
def matrix_product(gate: Gate, func: Any, input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The products that do not broadcast."""
    return matmul(gate, func, input, mat2, out=out)


def _times_weight(gate: Gate, func: Any, x: Tensor, weight: Tensor) -> Tensor:
    source = x.detach()

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        return [outer(weight, flat(rows, source.to(grad.dtype)), flat(rows, grad))]

    out = fresh(torch.matmul(x, weight.detach()))
    return gate.record(func, [weight], paired(lambda w: torch.matmul(source, w)), build, out, rows=x, reads=[source])


@rule(torch.addmm, Tensor.addmm)
def addmm(
    gate: Gate, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """β·bias + α·(x @ W), as in Hugging Face's Conv1D."""
    if alpha == beta == 1 and gate.is_public(input) and input.shape == mat2.shape[1:] and not gate.is_managed(mat1):
        return _affine(gate, func, input, mat1, mat2)
    with gate:
        product = torch.matmul(mat1, mat2)
        product = product if alpha == 1 else product * alpha
        return product + (input if beta == 1 else input * beta)


def _affine(gate: Gate, func: Any, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """bias + x @ W in one product."""
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    source = x.detach()

    def replay(*fresh: Tensor) -> Tensor:
        w, b = gate.fill(fresh, weight, bias)
        return torch.addmm(b, source, w)

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        delta = flat(rows, grad)
        uses: list[tuple[Tensor, Any]] = []
        if gate.is_managed(weight):
            uses.append(outer(weight, flat(rows, source.to(grad.dtype)), delta))
        if gate.is_managed(bias):
            uses.append((bias, Dense(delta.sum(1))))
        return uses

    out = fresh(torch.addmm(gate.cut(bias), x, gate.cut(weight)))
    return gate.record(func, managed, paired(replay), build, out, rows=x, reads=[source])


@rule(F.bilinear)
def bilinear(
    gate: Gate, func: Any, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Σ_ij x_i W_oij z_j + b_o, user by user."""
    return any_function(gate, _bilinear, (input1, input2, weight, bias), {})


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.einsum("...i,oij,...j->...o", input1, weight, input2)  # F.bilinear itself cannot be vmapped
    return out if bias is None else out + bias
