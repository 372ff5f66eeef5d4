"""torch.einsum of users' data with one parameter; others go user by user (any_function.py).

If the letters of the parameter fall into contracted ones (in the data, not in the result) and new ones (in the result,
not in the data), one kind after the other, the product is that of a linear layer: per user Σ_t left_bt ⊗ right_bt.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.gate import Gate
from dpformer.clipping.recorded_call import own, paired
from dpformer.clipping.rules.any_function import any_function
from dpformer.clipping.rules.registry import rule
from dpformer.clipping.turned import is_turned
from dpformer.clipping.user_rows import UserRows
from dpformer.clipping.uses import Outer


@rule(torch.einsum)
def einsum(gate: Gate, func: Any, *operands: Any) -> Tensor:
    """einsum(equation, *operands), operands perhaps as one list."""
    equation, *tensors = operands
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        tensors = list(tensors[0])
    data = [t for t in tensors if isinstance(t, Tensor) and not gate.is_public(t)]
    letters = _letters(equation, len(tensors))
    if letters is None or any(is_turned(t) for t in data):
        return any_function(gate, func, operands, {})
    sides, result = letters
    batches = {side[0] for side, t in zip(sides, tensors, strict=True) if not gate.is_public(t)}
    batch = batches.pop()
    if batches or batch not in result:
        managed = next(t for t in tensors if gate.is_managed(t))
        raise gate.refusal(managed, func, "let the first letter of users' data be the batch, and keep it in the result")
    first = batch + result.replace(batch, "")  # compute with the batch first, then give the order that was asked for
    out = _batch_first(gate, func, sides, first, tensors)
    return out.permute([first.index(letter) for letter in result])


def _batch_first(gate: Gate, func: Any, sides: list[str], result: str, tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 2 and sum(map(gate.is_managed, tensors)) == 1:
        w = 0 if gate.is_managed(tensors[0]) else 1
        split = _split(sides[1 - w], sides[w], result)
        if split is not None:
            return _linear(gate, func, sides[1 - w], sides[w], result, tensors[1 - w], tensors[w], split)
    return any_function(gate, func, (f"{','.join(sides)}->{result}", *tensors), {})


def _letters(equation: Any, operands: int) -> tuple[list[str], str] | None:
    """Letters of each operand and of the result; None for other ways to write an einsum."""
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    left, result = equation.replace(" ", "").split("->")
    sides = left.split(",")
    if len(sides) != operands or any(len(set(side)) < len(side) or not side for side in [*sides, result]):
        return None
    return sides, result


def _split(data: str, weight: str, result: str) -> int | None:
    """Where the parameter's letters change from one kind to the other; None if they are no linear layer's."""
    kinds = ["c" if k in data and k not in result else "n" if k in result and k not in data else "x" for k in weight]
    if "x" in kinds or any(k not in weight and k not in result for k in data) or len(set(kinds)) < 2:
        return None
    change = [n for n in range(1, len(kinds)) if kinds[n] != kinds[n - 1]]
    return change[0] if len(change) == 1 else None


def _linear(gate: Gate, func: Any, data: str, weight: str, result: str, x: Tensor, w: Tensor, split: int) -> Tensor:
    equation = f"{data},{weight}->{result}"
    source, places = x.detach(), [k for k in data if k in result]  # the batch is the first of them
    contracted = [k for k in weight if k in data]
    new = [k for k in weight if k not in data]

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        sides = {
            weight[0] in data: _rows(rows, source.to(grad.dtype), data, places, contracted),
            weight[0] not in data: _rows(rows, grad, result, places, new),
        }
        return [(w, Outer(sides[True], sides[False], tuple(w.shape)))]

    def replay(fresh: Tensor) -> Tensor:
        return torch.einsum(equation, source, fresh)

    out = own(torch.einsum(equation, x, w.detach()))
    return gate.record(func, [w], paired(replay), build, out, rows=x, reads=[source])


def _rows(rows: UserRows, t: Tensor, letters: str, places: Sequence[str], last: Sequence[str]) -> Tensor:
    """(B, T, Q): all places as positions, all of `last` as width."""
    ordered = t.permute([letters.index(k) for k in (*places, *last)])
    spread = rows.spread(ordered)
    return spread.reshape(rows.users, -1, prod(ordered.shape[len(places) :]))
