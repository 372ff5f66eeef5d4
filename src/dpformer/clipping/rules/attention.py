"""Attention with parameters: inside scaled_dot_product_attention (learned queries, biases), and nn.MultiheadAttention.

nn.MultiheadAttention and what is built on it is run through an exact equivalent made of linear layers.
torch calls `F.multi_head_attention_forward` with time first, whatever the module's `batch_first`; which dimension is
the batch is therefore known, and the equivalent works batch first inside.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.gate import Gate
from dpformer.clipping.picked import mark_computed
from dpformer.clipping.rules.broadcast import per_row
from dpformer.clipping.rules.registry import rule

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    gate: Gate,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A parameter among the arguments (learned queries, a learned bias as of T5) is copied to every row first."""
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    data = max((t for t in given.values() if t is not None and not gate.is_public(t)), key=lambda t: t.ndim)

    def copy(t: Tensor | None) -> Tensor | None:
        if t is None or not gate.is_managed(t):
            return t
        missing = data.ndim - t.ndim
        shape = (data.shape[0], *([1] * (missing - 1) if missing else []), *t.shape[0 if missing else 1 :])
        return per_row(gate, func, t, shape, data)

    copies = {name: copy(t) for name, t in given.items()}
    return func(**copies, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


@rule(F.multi_head_attention_forward)
def multi_head_attention(gate: Gate, func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward(query (L, B, E), key (S, B, E), value (S, B, E), …)."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    odd = [n for n in ("bias_k", "bias_v", "static_k", "static_v") if given[n] is not None]
    if odd or given["add_zero_attn"] or given["query"].ndim != 3:
        fix = "use it without add_bias_kv, add_zero_attn and static keys, on batched input"
        raise gate.refusal(given["out_proj_weight"], func, fix)
    same = given["query"] is given["key"] is given["value"]
    # Turned outside the gate: here the batch is known, whatever the gate may think of it.
    query, key, value = (mark_computed(given[name].transpose(0, 1)) for name in ("query", "key", "value"))
    if same:
        key = value = query
    with gate:
        return _attention(given | {"query": query, "key": key, "value": value})


def _attention(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    heads, drop = given["num_heads"], given["dropout_p"] if given["training"] else 0.0
    q, k, v = (_split(t, heads) for t in _project(given))  # (B, H, L, E/H)
    mask = _mask(given, q, k)
    if given["need_weights"]:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        maps = torch.softmax(scores if mask is None else scores + mask, -1)
        if drop:
            maps = F.dropout(maps, drop)
        mixed = maps @ v
    else:
        causal = given["is_causal"] and mask is None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop, is_causal=causal)
        maps = None
    joined = mixed.transpose(1, 2).flatten(2)  # (B, L, E)
    out = F.linear(joined, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1).contiguous()
    if maps is not None and given["average_attn_weights"]:
        maps = maps.mean(1)
    return out, maps


def _project(given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Queries, keys and values, each (B, L, E), from inputs of that shape."""
    query, key, value = given["query"], given["key"], given["value"]
    weight, bias = given["in_proj_weight"], given["in_proj_bias"]
    if not given["use_separate_proj_weight"] and query is key and key is value:
        return F.linear(query, weight, bias).chunk(3, -1)
    separate = [given[f"{n}_proj_weight"] for n in "qkv"]
    weights = separate if given["use_separate_proj_weight"] else weight.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def _split(t: Tensor, heads: int) -> Tensor:
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


def _mask(given: dict[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
    """One additive mask, (B, H or 1, L, S), from the two that torch takes; True means: do not attend."""
    masks = []
    attend, padding = given["attn_mask"], given["key_padding_mask"]
    if attend is not None:
        shaped = attend.reshape(q.shape[0], q.shape[1], *attend.shape[-2:]) if attend.ndim == 3 else attend[None, None]
        masks.append(_additive(shaped, q))
    if padding is not None:
        masks.append(_additive(padding[:, None, None, :], q))
    return sum(masks[1:], masks[0]) if masks else None


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))
    return mask
