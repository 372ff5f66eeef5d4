"""1-d convolution: y_bol = Σ_{c,k} w_ock · x_b,c,(l·stride + k·dilation), a linear layer over unfolded windows.

Per user and group: ∂/∂w = Σ_l δ_bl ⊗ window_bl.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.gate import Gate
from dpformer.clipping.rows import Rows
from dpformer.clipping.rules.registry import rule
from dpformer.clipping.tap import paired
from dpformer.clipping.uses import Dense, Outer


@rule(F.conv1d)
def conv1d(
    gate: Gate,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """x (B, C, L), weight (O, C/groups, K)."""
    x, stride, dilation = input, _one(stride), _one(dilation)
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    if gate.is_managed(x) or x.ndim != 3:
        raise gate.refusal(managed[0], func, "give it an input of shape (B, C, L)")
    before, after = _padding(padding, weight.shape[2], dilation)
    padded = F.pad(x, (before, after)) if before or after else x
    source = padded.detach()

    def run(data: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.conv1d(data, w, b, stride, 0, dilation, groups)

    def replay(*fresh: Tensor) -> Tensor:
        w, b = gate.fill(fresh, weight, bias)
        return run(source, w, b)

    def build(grad: Tensor, rows: Rows) -> list[tuple[Tensor, Any]]:
        delta = rows.spread(grad.mT)  # (B, rows a user, L', O)
        delta = delta.reshape(rows.users, -1, delta.shape[-1])
        uses: list[tuple[Tensor, Any]] = []
        if gate.is_managed(bias):
            uses.append((bias, Dense(delta.sum(1))))
        if gate.is_managed(weight):
            kernel = (1, weight.shape[2])
            windows = F.unfold(source.to(grad.dtype)[:, :, None], kernel, (1, dilation), 0, (1, stride)).mT
            windows = rows.spread(windows).reshape(rows.users, -1, windows.shape[-1])  # (B, T, C·K)
            uses.append((weight, _weight_use(delta, windows, tuple(weight.shape), groups)))
        return uses

    return gate.record(func, managed, paired(replay), build, run(padded, gate.cut(weight), gate.cut(bias)), rows=x)


def _weight_use(delta: Tensor, windows: Tensor, shape: tuple[int, ...], groups: int) -> Outer | Dense:
    if groups == 1:
        return Outer(delta, windows, shape)
    by_group = torch.einsum("btgo,btgw->bgow", delta.unflatten(2, (groups, -1)), windows.unflatten(2, (groups, -1)))
    return Dense(by_group.reshape(delta.shape[0], *shape))


def _one(value: Any) -> int:
    return int(value[0]) if isinstance(value, (tuple, list)) else int(value)


def _padding(padding: Any, kernel: int, dilation: int) -> tuple[int, int]:
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = dilation * (kernel - 1)
        return total // 2, total - total // 2
    return _one(padding), _one(padding)
