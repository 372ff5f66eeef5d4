"""Linear layers and matrix products: y = x Wᵀ + b, x @ W, addmm.

Per user b, with rows t: ∂/∂W of x Wᵀ is Σ_t δ_bt ⊗ x_bt, of x @ W it is Σ_t x_bt ⊗ δ_bt (δ the gradient at y).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.recorded_call import fresh, paired
from dpformer.clipping.recorder import Recorder
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
def linear(gate: Recorder, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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


@rule(torch.matmul)
def matmul(gate: Recorder, func: Any, input: Tensor, other: Tensor) -> Tensor:
    """x @ W."""
    return _times_weight(gate, func, input, other)


def _times_weight(gate: Recorder, func: Any, x: Tensor, weight: Tensor) -> Tensor:
    source = x.detach()

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        return [outer(weight, flat(rows, source.to(grad.dtype)), flat(rows, grad))]

    out = fresh(torch.matmul(x, weight.detach()))
    return gate.record(func, [weight], paired(lambda w: torch.matmul(source, w)), build, out, rows=x, reads=[source])


@rule(torch.addmm)
def addmm(gate: Recorder, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """bias + x @ W, as in Hugging Face's Conv1D."""
    return _affine(gate, func, input, mat1, mat2)


def _affine(gate: Recorder, func: Any, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
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
