"""The norms of many parameters at once, since small layers cost more to call than to compute.

Most uses of parameters are linear layers in float32 on the CPU, so they take a short way: compiled code measures all
that the backward pass has brought in one call. All preconditions of a plain one are checked by the caller
(rules/one_user.py); the rules of rules/linear.py and parameter_norms.py say the same of any linear layer. Gradients
that were written out already (biases, normalisation, scales) are put side by side: one norm, one sum for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.parameter_norms import Measured, ParameterUses, Ways, raise_squares
from dpformer.clipping.recording import CHANGED, Build, Paired, RecordedCall, Recorder, UserRows, fresh, paired
from dpformer.clipping.rounding import MOST, Rows, lengths_of, share, squared_lengths
from dpformer.clipping.uses import Dense, Outer
from dpformer.clipping.uses.cost import reach_of_product
from dpformer.errors import UnsupportedUse
from dpformer.kernels import native
from dpformer.kernels.products import Scratch, in_parts, parts_of

Refusal = Callable[[Any, Any, str], UnsupportedUse]

# -- linear layers, recorded -------------------------------------------------------------------------------------------


class AffineCall(RecordedCall):
    """x Wᵀ + b (F.linear), or b + x W (torch.addmm)."""

    def __init__(
        self, gate: Recorder, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, trains_weight: bool,
        trains_bias: bool,
    ) -> None:  # fmt: skip
        self.func, self.sink, self.context, self.grad = func, gate.sink, gate.context, None
        self.source, self.weight, self.bias = x, weight, bias
        self.trains_weight, self.trains_bias = trains_weight, trains_bias
        self.managed = [weight] if trains_weight else []
        if trains_bias and bias is not None:
            self.managed.append(bias)
        self.names = tuple([gate.names[id(t)] for t in self.managed])
        self.shape = x.shape
        self.versions = self._versions()
        self.refusal: Refusal = gate.refusal

    @property
    def columns(self) -> bool:
        """Whether W is (in, out), as addmm has it."""
        return self.func is torch.addmm

    def check(self) -> None:
        """Autograd's own check does not see what only the recorded calls have kept."""
        if self.versions != self._versions():
            raise self.refusal(self.managed[0], self.func, CHANGED)

    def _versions(self) -> list[int]:
        """Counts of writes."""
        return [self.source._version, *[t._version for t in self.managed]]

    @property
    def build(self) -> Build:  # type: ignore[override]
        return self._build

    @property
    def paired(self) -> Paired:  # type: ignore[override]
        return paired(self._replay)

    def _replay(self, *fresh: Tensor) -> Tensor:
        values = iter(fresh)
        weight = next(values) if self.trains_weight else self.weight
        bias = next(values) if self.trains_bias else self.bias
        return run(self.func, self.source, weight, bias)

    def sides(self, grad: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Rows whose outer products are the gradient of W."""
        return (source, grad) if self.columns else (grad, source)

    def _build(self, grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        self.check()
        delta, source = (rows.spread(t).reshape(rows.users, -1, t.shape[-1]) for t in (grad, self.source))
        uses: list[tuple[Tensor, Any]] = []
        if self.trains_weight:
            uses.append((self.weight, Outer(*self.sides(delta, source.to(grad.dtype)), tuple(self.weight.shape))))
        if self.trains_bias and self.bias is not None:
            uses.append((self.bias, Dense(delta.sum(1))))
        return uses

    def forget(self) -> None:
        self.grad = None
        del self.source  # nothing may ask for it now


def run(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, or b + x W."""
    if func is F.linear:
        return F.linear(x, weight, bias)
    assert bias is not None
    return torch.addmm(bias, x, weight)


def is_plain(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the numbers are what compiled code reads, and torch computes in float32 what is asked for in float32."""
    single = torch.float32
    return (
        x.dtype is single
        and weight.dtype is single
        and x.ndim > 1
        and weight.ndim == 2
        and (bias is None or (bias.dtype is single and bias.shape == weight.shape[func is torch.addmm :][:1]))
        and weight.is_cpu
        and x.is_cpu
        and weight.numel() > 0
        and x.numel() > 0
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def record_affine(
    gate: Recorder, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, trains_weight: bool, trains_bias: bool
) -> Tensor:
    """Runs a plain call on the values of its parameters, and records it."""
    weight_value = weight.detach() if trains_weight else weight
    bias_value = bias.detach() if trains_bias and bias is not None else bias
    out = fresh(run(func, x, weight_value, bias_value))
    call = AffineCall(gate, func, x.detach(), weight, bias, trains_weight, trains_bias)
    gate.calls.append(call)
    return call.watch(out, gate.token)


# -- linear layers, measured -------------------------------------------------------------------------------------------


def can_measure(call: AffineCall, grad: Tensor, users: int) -> bool:
    """Whether compiled code reads it, once there are no gaps in it."""
    return (
        native.reads_tensors()
        and grad.dtype == torch.float32
        and grad.layout == torch.strided
        and call.shape[0] % users == 0
        and grad.numel() > 0
        and not (grad.is_neg() or call.source.is_neg())
    )


@dataclass
class Found:
    """What linear layers say."""

    groups: list[ParameterUses]  # the weights, written out for the most part
    small: StackedGradients | None  # the biases
    squares: tuple[np.ndarray, np.ndarray]  # (G, B) of most weights: as computed, and at most
    others: list[Measured]  # the other weights


class BatchedLinear:
    """Linear layers that wait to be measured; each is the only call that has used its parameters.

    Args:
        again: where to write products whose squares alone are kept; they are written once more for each sum.
    """

    def __init__(self, users: int, again: Scratch | None) -> None:
        self.users, self.again = users, again
        self.weights: list[tuple[Tensor, Tensor, Tensor]] = []  # a parameter, and the two sides of its outer products
        self.biases: list[tuple[Tensor, Tensor]] = []  # a parameter, and the gradient at the result
        self.reads: list[tuple[AffineCall, Tensor, int]] = []  # what calls wait with, and its count of writes
        self.numbers = 0  # that they hold
        self.room = 0  # numbers that will be written out
        self.work = 0  # multiply-adds

    def add(self, call: AffineCall, grad: Tensor) -> None:
        call.check()
        grad, source = grad.contiguous(), call.source.contiguous()
        self.reads += [(call, grad, grad._version), (call, source, source._version)]
        if call.trains_weight:
            self.weights.append((call.weight, *call.sides(grad, source)))
            self.room += self.users * call.weight.numel()
            self.work += grad.numel() * call.shape[-1]
        if call.trains_bias and call.bias is not None:
            self.biases.append((call.bias, grad))
        self.numbers += grad.numel() + source.numel()

    def measure(self) -> Found:
        """By one call of compiled code for each thread."""
        for call, read, version in self.reads:
            if read._version != version:  # a hook has kept the gradient, say, and writes into it later
                raise call.refusal(call.managed[0], call.func, CHANGED)
        sizes = [(left.shape[-1], right.shape[-1]) for _, left, right in self.weights]
        reaches = [reach_of_product(*size) for size in sizes]
        if self.again is None:
            written = [torch.empty(self.users, *size) for size in sizes]
            groups = [ParameterUses(weight, [], out) for (weight, _, _), out in zip(self.weights, written, strict=True)]
        else:
            # Threads may write over each other here: squares are taken before anything is written.
            written = self.again.views([(self.users, *size) for size in sizes])
            groups = [ParameterUses(one[0], [self._use(n)], None, self.again) for n, one in enumerate(self.weights)]
        small, sums = self._biases()
        told, squares = np.empty((len(groups), self.users, 3)), np.empty((len(groups), self.users))
        uses = [(*one[1:], out, most) for one, out, most in zip(self.weights, written, reaches, strict=True)]
        parts = parts_of(self.users, self.work)

        def measure(first: int, last: int) -> None:
            assert native.kernels is not None
            matrix = None if small is None else small.matrix
            native.kernels.measure_uses(uses, sums, matrix, self.users, first, last, told, squares)

        in_parts(measure, parts)
        few = told[:, :, 1] < np.array(reaches)[:, None]
        odd = (few | ~(told[:, :, 2] <= MOST)).any(1)
        others = [self._other(n, groups[n], told[n], squares[n], few[n], parts) for n in np.flatnonzero(odd).tolist()]
        plain = np.flatnonzero(~odd)
        return Found(groups, small, self._raised(plain, groups, told[plain], squares[plain]), others)

    def _biases(self) -> tuple[StackedGradients | None, list[tuple[Tensor, int, int]]]:
        """Room for the gradients of all biases in one matrix, and whose rows are added up from which column on."""
        if not self.biases:
            return None, []
        sizes = [bias.numel() for bias, _ in self.biases]
        matrix = torch.empty(self.users, sum(sizes))
        places = accumulate(sizes, initial=0)
        groups = [
            ParameterUses(bias, [Dense(part)])
            for (bias, _), part in zip(self.biases, matrix.split(sizes, 1), strict=True)
        ]
        sums = [(grad, at, n) for (_, grad), at, n in zip(self.biases, places, sizes, strict=False)]
        return StackedGradients(groups, matrix), sums

    def _use(self, n: int) -> Outer:
        weight, *sides = self.weights[n]
        left, right = (side.view(self.users, -1, side.shape[-1]) for side in sides)
        return Outer(left, right, tuple(weight.shape))

    def _raised(
        self, places: np.ndarray, groups: list[ParameterUses], told: np.ndarray, squares: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of weights that all users have many rows of, none of them large."""
        sizes = [groups[n].parameter.numel() for n in places]
        for n, size in zip(places, sizes, strict=True):
            groups[n].room = self.users * size
        ones, shares = np.ones((len(sizes), 1)), np.array([share(size, torch.float32) for size in sizes])
        numbers = np.array(sizes, dtype=np.float64)[:, None]
        rows = Rows(told[:, :, 0], told[:, :, 1], ones, numbers, shares[:, None], torch.float32)

        def in_double(place: int, user: int) -> float:
            n = int(places[place])
            one = Measured(groups[n], [self._use(n)], lengths_of(told[place][None]), torch.empty(0), 0)
            return float(one.in_double(user))

        return raise_squares(squares, rows, None, in_double)

    def _other(
        self,
        n: int,
        group: ParameterUses,
        told: np.ndarray,
        squares: np.ndarray,
        few: np.ndarray,
        parts: Sequence[tuple[int, int]],
    ) -> Measured:
        """Where some users have few rows, or large ones: the way of parameter_norms.py."""
        use = self._use(n)
        ways = Ways([use], lengths_of(told[None]), few, bool(few.all()), bool(few.any()))
        made = None
        if group.written is not None and not any(few[a:b].all() for a, b in parts):
            made = group.written, torch.from_numpy(squares)
        group.written, group.sources = None, [use]
        return group.by_rows(ways) if ways.all_few else group.wrote(ways, 0, True, made)


# -- gradients that were written out already, side by side -------------------------------------------------------------


LARGE = 1 << 14  # numbers of one user: who else is in the batch decides nothing


@dataclass
class StackedGradients:
    """The gradients of some parameters, each with one dense use, in one matrix."""

    groups: list[ParameterUses]
    matrix: Tensor  # (B, numbers of all)

    @staticmethod
    def of(groups: Sequence[ParameterUses]) -> list[StackedGradients]:
        """All of one precision together; large ones are not copied."""
        kinds: dict[object, list[ParameterUses]] = {}
        for group in groups:
            gradient, small = group.dense_gradient, group.parameter.numel() < LARGE
            kinds.setdefault((gradient.dtype, gradient.device) if small else id(group), []).append(group)
        return [_joined(some) for some in kinds.values()]

    def squares(self) -> Tensor:
        """(2, B) of all these parameters together: as computed, and at most."""
        return torch.stack(squared_lengths(self.matrix))

    def keep(self, users: Tensor) -> None:
        """Forgets every user that is not kept."""
        self.matrix = self.matrix.masked_fill(~users[:, None], 0)

    def sums(self, c: Tensor) -> Iterator[tuple[ParameterUses, Tensor]]:
        """Σ_b c_b g_b of each parameter."""
        total = c.to(self.matrix.dtype) @ self.matrix
        sizes = [prod(group.parameter.shape) for group in self.groups]
        for group, part in zip(self.groups, total.split(sizes), strict=True):
            yield group, part.view(group.parameter.shape)


def _joined(groups: list[ParameterUses]) -> StackedGradients:
    gradients = [group.dense_gradient for group in groups]
    users = len(gradients[0])
    if len(groups) == 1:
        return StackedGradients(groups, gradients[0].reshape(users, -1))
    matrix = torch.cat([g.reshape(users, -1) for g in gradients], 1)
    at = 0
    for group, gradient in zip(groups, gradients, strict=True):  # a part of the matrix, instead of a copy
        end = at + prod(gradient.shape[1:])
        group.sources = [Dense(matrix[:, at:end].reshape(gradient.shape))]
        at = end
    return StackedGradients(groups, matrix)
