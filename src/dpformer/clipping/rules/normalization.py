"""Normalisation, y = x̂·w + b: over the last dimensions (LayerNorm, RMSNorm) or by channel (group, instance, batch).

Per user: ∂/∂w = Σ_t δ_bt·x̂_bt, ∂/∂b = Σ_t δ_bt. Batch normalisation has x̂ of one user only in eval mode, where the
statistics are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.recording import FREEZE_BATCH_NORM, Recorder, UserRows, paired, rule
from dpformer.clipping.rules.linear import flat
from dpformer.clipping.uses import Dense
from dpformer.kernels import native

Norm = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]  # of an input, a weight and a bias


@rule(F.layer_norm)
def layer_norm(
    gate: Recorder,
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

    if len(normalized_shape) == 1 and _is_plain(input) and not gate.is_managed(input) and input.ndim > 1:
        return _layer_norm(gate, func, input, weight, bias, norm, eps)
    return _affine(gate, func, input, len(normalized_shape), weight, bias, norm)


@rule(F.rms_norm)
def rms_norm(
    gate: Recorder,
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


@rule(F.group_norm)
def group_norm(
    gate: Recorder,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Statistics of each user's own channels."""

    def norm(source: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.group_norm(source, num_groups, w, b, eps)

    return _affine(gate, func, input, 1, weight, bias, norm, channels=True)


@rule(F.instance_norm)
def instance_norm(
    gate: Recorder,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Statistics of each user's own channels, or constants."""
    if use_input_stats and running_mean is not None:
        fix = "use it without track_running_stats: running statistics of users stay outside the guarantee"
        raise gate.refusal(weight if gate.is_managed(weight) else bias, func, fix)

    def norm(source: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.instance_norm(source, running_mean, running_var, w, b, use_input_stats, momentum, eps)

    return _affine(gate, func, input, 1, weight, bias, norm, channels=True)


@rule(F.batch_norm)
def batch_norm(
    gate: Recorder,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """With constant statistics only."""
    if training:
        raise gate.refusal(weight if gate.is_managed(weight) else bias, func, FREEZE_BATCH_NORM)

    def norm(source: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.batch_norm(source, running_mean, running_var, w, b, False, momentum, eps)

    return _affine(gate, func, input, 1, weight, bias, norm, channels=True)


def _affine(
    gate: Recorder,
    func: Any,
    x: Tensor,
    normalized_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    channels: bool = False,
) -> Tensor:
    """Weight and bias belong to the last dimensions or, with `channels`, to the second."""
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    if gate.is_managed(x) or x.ndim <= normalized_dims:  # normalising over the batch dimension would mix users
        raise gate.refusal(
            managed[0], func, "normalise over the last dimensions of a tensor that begins with the batch"
        )
    source = x.detach()

    def replay(*fresh: Tensor) -> Tensor:
        w, b = gate.fill(fresh, weight, bias)
        return norm(source, w, b)

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        first, last = (2, grad.ndim) if channels else (1, grad.ndim - normalized_dims)
        return _sums(gate, grad, rows, (weight, bias), norm, source, tuple(range(first, last)))

    out = norm(x, gate.cut(weight), gate.cut(bias))
    return gate.record(func, managed, paired(replay), build, out, rows=x, reads=[source])


def _sums(
    gate: Recorder,
    grad: Tensor,
    rows: UserRows,
    parameters: tuple[Tensor | None, Tensor | None],
    norm: Norm,
    source: Tensor,
    between: tuple[int, ...],
) -> list[tuple[Tensor, Any]]:
    """What weight and bias get, summed over the dimensions between the rows and their own."""
    weight, bias = parameters

    def total(t: Tensor) -> Dense:
        return Dense(rows.total(t.sum(between) if between else t))

    uses: list[tuple[Tensor, Any]] = []
    if gate.is_managed(weight):
        uses.append((weight, total(grad * norm(source.to(grad.dtype), None, None))))
    if gate.is_managed(bias):
        uses.append((bias, total(grad)))
    return uses


def _is_plain(x: Tensor) -> bool:
    """Whether compiled code reads it, and torch computes in float32 what is asked for in float32."""
    return native.supports(x) and not torch.is_autocast_enabled("cpu")


def _layer_norm(
    gate: Recorder, func: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm, eps: float
) -> Tensor:
    """Over the last dimension: the backward pass takes mean and scale of each row from the forward pass."""
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    source = x.detach()

    def replay(*fresh: Tensor) -> Tensor:
        return norm(source, *gate.fill(fresh, weight, bias))

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        if grad.dtype != torch.float32:  # a parameter in float64
            return _sums(gate, grad, rows, (weight, bias), norm, source, tuple(range(1, grad.ndim - 1)))
        sums = _layer_norm_sums(*(flat(rows, t) for t in (source, grad, mean, scale)))
        return [(p, Dense(total)) for p, total in zip((weight, bias), sums, strict=True) if gate.is_managed(p)]

    values = (gate.cut(weight), gate.cut(bias))
    out, mean, scale = torch.native_layer_norm(x, x.shape[-1:], *values, eps)
    mean, scale = mean.detach(), scale.detach()
    return gate.record(func, managed, paired(replay), build, out, rows=x, reads=[source])


def _layer_norm_sums(x: Tensor, grad: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, d) → Σ_t δ_bt·x̂_bt and Σ_t δ_bt, (B, d), in one pass of compiled code."""
    assert native.kernels is not None
    scaled, summed = (x.new_empty(len(x), x.shape[2]) for _ in range(2))
    rows = [native.rows_of(x), native.rows_of(grad), mean.contiguous().numpy(), scale.contiguous().numpy()]
    native.kernels.norm_sums(*rows, scaled.numpy(), summed.numpy())
    return scaled, summed
