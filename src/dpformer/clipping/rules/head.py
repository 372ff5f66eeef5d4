"""The softmax head (dpformer.clipping.softmax_loss): a linear use whose left side, the residuals, is made in tiles."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.gate import Gate
from dpformer.clipping.head import HeadRows, HeadUse, _SoftmaxLoss, softmax_loss
from dpformer.clipping.rows import Rows


def head(gate: Gate, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """softmax_loss(hidden, weight, targets, bias=None)."""
    hidden, weight, targets = args
    bias = kwargs.get("bias")
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    if gate.is_managed(hidden) or gate.is_public(targets):
        raise gate.refusal(managed[0], func, "give it hidden states and targets of users")
    positions = HeadRows.of(hidden, weight, targets, bias)
    source = hidden.detach()

    def replay(*fresh: Tensor) -> Tensor:
        """What anyone would write: all logits, then cross-entropy."""
        w, b = gate.fill(fresh, weight, bias)
        logits = F.linear(source.to(w.dtype), w, b)
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
        valid = (targets >= 0).sum(1).clamp(min=1)
        return each.reshape(targets.shape).sum(1) / valid

    def build(grad: Tensor, rows: Rows) -> list[tuple[Tensor, Any]]:
        uses: list[tuple[Tensor, Any]] = []
        if gate.is_managed(weight):
            uses.append((weight, HeadUse(positions, grad, of_bias=False)))
        if gate.is_managed(bias):
            uses.append((bias, HeadUse(positions, grad, of_bias=True)))
        return uses

    out = _SoftmaxLoss.apply(hidden, gate.cut(weight), gate.cut(bias), positions)
    return gate.record(func, managed, replay, build, out, rows=hidden)


RULES = {softmax_loss: head}
