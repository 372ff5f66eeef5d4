"""Linear layers and matrix products: y = x Wᵀ + b, x @ W, addmm.

Per user b, with rows t: ∂/∂W of x Wᵀ is Σ_t δ_bt ⊗ x_bt, of x @ W it is Σ_t x_bt ⊗ δ_bt (δ the gradient at y).

Sums of products in einsum, and convolutions (over windows), are linear layers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.recording import Recorder, UserRows, fresh, own, paired, rule
from dpformer.clipping.uses import Dense, Outer


def flat(rows: UserRows, t: Tensor) -> Tensor:
    """(rows, …, d) → (B, T, d) with everything between first and last dimension taken as positions."""
    t = rows.spread(t)
    return t.reshape(t.shape[0], -1, t.shape[-1])


def outer(weight: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Outer]:
    """The use of a weight (or of its transpose: then the sides change places on the parameter itself)."""
    owner = getattr(weight, "_phantom_transpose_of", None)
    if owner is not None:
        return owner, Outer(right, left, tuple(owner.shape))
    return weight, Outer(left, right, tuple(weight.shape))


@rule(F.linear)
def linear(gate: Recorder, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input Wᵀ + b."""
    x = input
    if gate.is_managed(x) or x.ndim < 2 or weight.ndim != 2:
        raise gate.refusal(weight if gate.is_managed(weight) else x, func, "give it an input with a batch dimension")
    if bias is not None and gate.is_managed(bias) and bias.shape != weight.shape[:1]:
        raise gate.refusal(bias, func, "give it a number for each output")
    trained, trained_bias = weight if gate.is_managed(weight) else None, bias if gate.is_managed(bias) else None
    managed = [p for p in (trained, trained_bias) if p is not None]
    source = x.detach()

    def replay(*fresh: Tensor) -> Tensor:
        w, b = gate.fill(fresh, weight, bias)
        return F.linear(source, w, b)

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        delta = flat(rows, grad)
        uses: list[tuple[Tensor, Any]] = []
        if trained is not None:
            uses.append(outer(trained, delta, flat(rows, source.to(grad.dtype))))
        if trained_bias is not None:
            uses.append((trained_bias, Dense(delta.sum(1))))
        return uses

    values = weight if trained is None else trained.detach(), bias if trained_bias is None else trained_bias.detach()
    out = fresh(F.linear(x, *values))
    return gate.record(func, managed, paired(replay), build, out, rows=x, reads=[source])


@rule(torch.matmul)
def matmul(gate: Recorder, func: Any, input: Tensor, other: Tensor) -> Tensor:
    """x @ W."""
    return _times_weight(gate, func, input, other)


def _times_weight(gate: Recorder, func: Any, x: Tensor, weight: Tensor) -> Tensor:
    source = x.detach()

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        return [outer(weight, flat(rows, source.to(grad.dtype)), flat(rows, grad))]

    out = fresh(torch.matmul(x, weight.detach()))
    return gate.record(func, [weight], paired(lambda w: torch.matmul(source, w)), build, out, rows=x, reads=[source])


@rule(torch.addmm)
def addmm(gate: Recorder, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """bias + x @ W, as in Hugging Face's Conv1D."""
    return _affine(gate, func, input, mat1, mat2)


def _affine(gate: Recorder, func: Any, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """bias + x @ W in one product."""
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    source = x.detach()

    def replay(*fresh: Tensor) -> Tensor:
        w, b = gate.fill(fresh, weight, bias)
        return torch.addmm(b, source, w)

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        delta = flat(rows, grad)
        uses: list[tuple[Tensor, Any]] = []
        if gate.is_managed(weight):
            uses.append(outer(weight, flat(rows, source.to(grad.dtype)), delta))
        if gate.is_managed(bias):
            uses.append((bias, Dense(delta.sum(1))))
        return uses

    out = fresh(torch.addmm(gate.cut(bias), x, gate.cut(weight)))
    return gate.record(func, managed, paired(replay), build, out, rows=x, reads=[source])


# -- einsum ------------------------------------------------------------------------------------------------------------


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


# -- convolution -------------------------------------------------------------------------------------------------------


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
