"""torch.einsum of users' data with one parameter; in others each user gets a copy of it.

If the letters of the parameter fall into contracted ones (in the data, not in the result) and new ones (in the result,
not in the data), one kind after the other, the product is that of a linear layer: per user Σ_t left_bt ⊗ right_bt.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.recorded_call import own, paired
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.user_rows import UserRows
from dpformer.clipping.uses import Outer


def linear_layer(gate: Recorder, func: Any, equation: Any, tensors: Sequence[Tensor]) -> Tensor | None:
    """The result for all users, if it is a linear layer of users' data, (B, …), and a parameter; else None.

    The equation is that of one user.
    """
    letters = _letters(equation, len(tensors))
    if letters is None or len(tensors) != 2 or sum(map(gate.is_managed, tensors)) != 1:
        return None
    sides, result = letters
    users = next(letter for letter in ascii_letters if letter not in equation)
    w = 0 if gate.is_managed(tensors[0]) else 1
    data, result = users + sides[1 - w], users + result
    split = _split(data, sides[w], result)
    if split is None:
        return None
    return _linear(gate, func, data, sides[w], result, tensors[1 - w], tensors[w], split)


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


def _linear(gate: Recorder, func: Any, data: str, weight: str, result: str, x: Tensor, w: Tensor, split: int) -> Tensor:
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
