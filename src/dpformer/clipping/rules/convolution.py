"""Convolution in one or two dimensions: a linear layer over windows.

y_bol = Σ_{c,k} w_ock · x_b,c,(l·stride + k·dilation), so per user and group: ∂/∂w = Σ_l δ_bl ⊗ window_bl. A 1-d
convolution is a 2-d one of height 1. In transposed and 3-d convolutions each user gets a copy of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.recorded_call import paired
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.rules.registry import rule
from dpformer.clipping.user_rows import UserRows
from dpformer.clipping.uses import Dense, Outer


@rule(F.conv1d, F.conv2d)
def convolution(
    gate: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """x (B, C, L) or (B, C, H, W), weight (O, C/groups, *kernel)."""
    dims = weight.ndim - 2
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    if gate.is_managed(input) or input.ndim != weight.ndim:
        raise gate.refusal(managed[0], func, "give it an input that begins with the batch and the channels")
    stride, dilation = _each(stride, dims), _each(dilation, dims)
    edges = _edges(padding, tuple(weight.shape[2:]), dilation)
    padded = F.pad(input, edges) if any(edges) else input
    source = padded.detach()

    def run(data: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return func(data, w, b, stride, 0, dilation, groups)

    def replay(*fresh: Tensor) -> Tensor:
        w, b = gate.fill(fresh, weight, bias)
        return run(source, w, b)

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        delta = rows.spread(grad.flatten(2).mT)  # (B, rows a user, places, O)
        delta = delta.reshape(rows.users, -1, delta.shape[-1])
        uses: list[tuple[Tensor, Any]] = []
        if gate.is_managed(bias):
            uses.append((bias, Dense(delta.sum(1))))
        if gate.is_managed(weight):
            data, ones = source.to(grad.dtype), (1,) * (2 - dims)
            data = data[:, :, None] if dims == 1 else data
            kernel = (*ones, *weight.shape[2:])
            windows = F.unfold(data, kernel, (*ones, *dilation), 0, (*ones, *stride)).mT  # (rows, places, C·kernel)
            windows = rows.spread(windows).reshape(rows.users, -1, windows.shape[-1])
            uses.append((weight, _weight_use(delta, windows, tuple(weight.shape), groups)))
        return uses

    out = run(padded, gate.cut(weight), gate.cut(bias))
    return gate.record(func, managed, paired(replay), build, out, rows=input, reads=[source])


def _weight_use(delta: Tensor, windows: Tensor, shape: tuple[int, ...], groups: int) -> Outer | Dense:
    if groups == 1:
        return Outer(delta, windows, shape)
    by_group = torch.einsum("btgo,btgw->bgow", delta.unflatten(2, (groups, -1)), windows.unflatten(2, (groups, -1)))
    return Dense(by_group.reshape(delta.shape[0], *shape))


def _each(value: Any, dims: int) -> tuple[int, ...]:
    """One number for each dimension."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return tuple(map(int, given * dims if len(given) == 1 else given))


def _edges(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Zeros before and after, as F.pad wants them: the last dimension first."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [edge for total in reversed(totals) for edge in (total // 2, total - total // 2)]
    return [edge for each in reversed(_each(padding, len(kernel))) for edge in (each, each)]
