"""Tables read by index: F.embedding, table[ids], index_select. Per user: Σ_t onehot(id_bt) ⊗ δ_bt."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.recording import Recorder, UserRows, paired, rule
from dpformer.clipping.uses import Lookup


@rule(F.embedding)
def embedding(
    gate: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """The padding row takes no gradient and counts in no norm."""
    if max_norm is not None or scale_grad_by_freq:
        raise gate.refusal(weight, func, "leave out max_norm and scale_grad_by_freq: they depend on other users")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _read(gate, func, input, weight, padding_idx)


@rule(F.embedding_bag)
def embedding_bag(
    gate: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Bags of equal size, one a row: an embedding, then sum, mean or maximum over the bag. Padding is in no bag."""
    if input.ndim != 2 or offsets is not None:
        raise gate.refusal(weight, func, "give it ids of shape (B, L) without offsets; pad with padding_idx")
    with gate:
        rows = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)  # (B, L, D)
        if padding_idx is None:
            counted = torch.ones_like(input, dtype=torch.bool)
        else:
            counted = input != padding_idx % len(weight)
        if mode == "max":
            chosen = rows.masked_fill(~counted[..., None], float("-inf")).max(1).values
            return chosen.masked_fill(~counted.any(1, keepdim=True), 0)
        rows = rows if per_sample_weights is None else rows * per_sample_weights[..., None]
        total = rows.masked_fill(~counted[..., None], 0).sum(1)
        return total if mode == "sum" else total / counted.sum(1, keepdim=True).clamp(min=1)


@rule(Tensor.__getitem__)
def getitem(gate: Recorder, func: Any, table: Tensor, ids: Tensor, /) -> Tensor:
    """table[ids]"""
    return _read(gate, func, torch.where(ids < 0, ids + table.shape[0], ids), table, None)


def _read(gate: Recorder, func: Any, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
    width = table[0].numel()

    def values(weight: Tensor) -> Tensor:
        if weight.ndim == 2:
            return F.embedding(ids, weight, padding)
        return weight[ids]

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        delta = grad.reshape(*ids.shape, width)
        if padding is not None:
            delta = delta.masked_fill((ids == padding)[..., None], 0)
        ids_of_user = rows.spread(ids.long())
        by_user = rows.spread(delta)
        users = ids_of_user.shape[0]
        return [(table, Lookup(ids_of_user.reshape(users, -1), by_user.reshape(users, -1, width), tuple(table.shape)))]

    return gate.record(func, [table], paired(values), build, values(table.detach()), rows=ids, reads=[ids])
