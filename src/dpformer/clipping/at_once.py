"""The norms of many linear layers at once: one call of compiled code for all that the backward pass has brought.

What it says is what norms.py says of each parameter alone: small layers cost more to call than to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping.affine import AffineCall
from dpformer.clipping.norms import Measured, ParameterUses, Ways, raise_squares
from dpformer.clipping.products import Scratch, in_parts, parts_of
from dpformer.clipping.recorded_call import CHANGED
from dpformer.clipping.rounding import Rows, share
from dpformer.clipping.row_lengths import MOST, lengths_of
from dpformer.clipping.side_by_side import SideBySide
from dpformer.clipping.uses import Dense, Outer
from dpformer.clipping.uses.cost import reach_of_product
from dpformer.kernels import native


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
    small: SideBySide | None  # the biases
    squares: tuple[np.ndarray, np.ndarray]  # (G, B) of most weights: as computed, and at most
    others: list[Measured]  # the other weights


class AtOnce:
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

    def _biases(self) -> tuple[SideBySide | None, list[tuple[Tensor, int, int]]]:
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
        return SideBySide(groups, matrix), sums

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
        """Where some users have few rows, or large ones: the way of norms.py."""
        use = self._use(n)
        ways = Ways([use], lengths_of(told[None]), few, bool(few.all()), bool(few.any()))
        made = None
        if group.written is not None and not any(few[a:b].all() for a, b in parts):
            made = group.written, torch.from_numpy(squares)
        group.written, group.sources = None, [use]
        return group.by_rows(ways) if ways.all_few else group.wrote(ways, 0, True, made)
