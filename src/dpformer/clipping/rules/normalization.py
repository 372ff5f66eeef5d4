"""LayerNorm and RMSNorm: y = x̂·w + b. Per user: ∂/∂w = Σ_t δ_bt·x̂_bt, ∂/∂b = Σ_t δ_bt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.gate import Gate
from dpformer.clipping.rows import Rows
from dpformer.clipping.rules.registry import rule
from dpformer.clipping.tap import paired
from dpformer.clipping.uses import Dense


@rule(F.layer_norm)
def layer_norm(
    gate: Gate,
    func: Any,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(x − mean) / √(variance + eps)·w + b."""

    def norm(source: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.layer_norm(source, normalized_shape, w, b, eps)

    return _affine(gate, func, input, len(normalized_shape), weight, bias, norm)


@rule(F.rms_norm)
def rms_norm(
    gate: Gate,
    func: Any,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """x / √(mean of x² + eps)·w."""

    def norm(source: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.rms_norm(source, list(normalized_shape), w, eps)

    return _affine(gate, func, input, len(normalized_shape), weight, None, norm)


def _affine(
    gate: Gate,
    func: Any,
    x: Tensor,
    normalized_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
) -> Tensor:
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    if gate.is_managed(x) or x.ndim <= normalized_dims:  # normalising over the batch dimension would mix users
        raise gate.refusal(
            managed[0], func, "normalise over the last dimensions of a tensor that begins with the batch"
        )
    source = x.detach()

    def replay(*fresh: Tensor) -> Tensor:
        w, b = gate.fill(fresh, weight, bias)
        return norm(source, w, b)

    def build(grad: Tensor, rows: Rows) -> list[tuple[Tensor, Any]]:
        between = tuple(range(1, grad.ndim - normalized_dims))

        def total(t: Tensor) -> Dense:
            return Dense(rows.total(t.sum(between) if between else t))

        uses: list[tuple[Tensor, Any]] = []
        if gate.is_managed(weight):
            uses.append((weight, total(grad * norm(source.to(grad.dtype), None, None))))
        if gate.is_managed(bias):
            uses.append((bias, total(grad)))
        return uses

    out = norm(x, gate.cut(weight), gate.cut(bias))
    return gate.record(func, managed, paired(replay), build, out, rows=x)
