"""The softmax head (dpformer.clipping.softmax_loss): a linear use whose left side, the residuals, is made in tiles."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dpformer.clipping.recorder import Recorder
from dpformer.clipping.rules.registry import rule
from dpformer.clipping.softmax_head import HeadRows, HeadUse, _SoftmaxLoss, softmax_loss
from dpformer.clipping.user_rows import UserRows

AT_ONCE = 1 << 24  # logits in the proof


@rule(softmax_loss)
def softmax_head(
    gate: Recorder,
    func: Any,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    position_weights: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """One loss a user."""
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    if gate.is_managed(hidden) or gate.is_public(targets):
        raise gate.refusal(managed[0], func, "give it hidden states and targets of users")
    if row_scale is not None and not gate.is_public(row_scale):
        raise gate.refusal(managed[0], func, "scale rows by a buffer of the model, the same for all users")
    positions = HeadRows.of(hidden, weight, targets, bias, position_weights, row_scale)
    source = hidden.detach()

    def replay(asked: Tensor, *fresh: Tensor) -> Tensor:
        """What anyone would write, all logits and then cross-entropy, for the users that are asked for."""
        w, b = gate.fill(fresh, weight, bias)
        w = w if row_scale is None else w * row_scale[:, None].to(w.dtype)
        logits, wanted = F.linear(source[asked].to(w.dtype), w, b), targets[asked]
        each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="none")
        counted = (wanted >= 0).to(each.dtype)
        if position_weights is not None:
            counted = position_weights[asked].to(each.dtype).where(wanted >= 0, 0)
        total = counted.sum(1)
        return (each.reshape(wanted.shape) * counted).sum(1) / total.where(total > 0, 1)

    def part(asked: Tensor, grad: Tensor, *fresh: Tensor) -> Tensor:
        return (replay(asked, *fresh) * grad[asked]).sum()

    def paired(grad: Tensor, *fresh: Tensor) -> Tensor:
        """Of all users, a few at a time: their logits are made again in the backward pass, never all at once."""
        few = max(1, AT_ONCE // max(1, hidden.shape[1] * len(weight)))
        parts = (
            checkpoint(part, asked, grad, *fresh, use_reentrant=False, preserve_rng_state=False)
            for asked in grad.nonzero()[:, 0].split(few)
        )
        return sum(parts, grad.new_zeros(()))

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        uses: list[tuple[Tensor, Any]] = []
        if gate.is_managed(weight):
            uses.append((weight, HeadUse(positions, grad, of_bias=False)))
        if gate.is_managed(bias):
            uses.append((bias, HeadUse(positions, grad, of_bias=True)))
        return uses

    out = _SoftmaxLoss.apply(hidden, gate.cut(weight), gate.cut(bias), positions)
    return gate.record(func, managed, paired, build, out, rows=hidden)
