"""All uses of one parameter together: per-user norms, then the clipped sum.

Either gradients are written out and squared, or the inner products of all pairs of uses are summed (Gram), whichever is
cheaper for the rows that a user has (docs/maths/phantom-clipping.md). Written-out gradients are kept while those of all
parameters fit `KEEP` numbers, so that the clipped sum is one weighted sum of them instead of another product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping.recording import Source, leaves
from dpformer.clipping.rounding import (
    CANCEL,
    LOOSE,
    PIECE,
    RowLengths,
    Rows,
    is_plain,
    lengths_of,
    row_lengths,
    some_of,
    square_error,
    sums_of_squares,
    without_zeros,
)
from dpformer.clipping.uses import Dense, Lookup, Outer, Ragged, Use, by_rows, inner, reach, squared, tensor_of
from dpformer.clipping.uses.expression import Expression
from dpformer.kernels import native
from dpformer.kernels.products import A_FEW, Scratch, can_multiply, measured_products

KEEP = 48 << 20  # numbers written out and kept: 192 MB of float32


@dataclass
class ParameterUses:
    """Every use of one parameter in one forward pass."""

    parameter: Tensor
    sources: list[Source]
    written: Tensor | None = None  # (B, *shape), if kept
    again: Scratch | None = None  # where to write out for each sum, to the same bits, instead of keeping it
    step: int = 0  # users whose gradients are written out at once, if they are not kept
    room: int = 0  # numbers that are kept
    alone: dict[int, list[Use]] = field(default_factory=dict)  # users whose rows cancel: added up in float64

    @property
    def is_dense(self) -> bool:
        """Whether the gradients were written out before, by one use."""
        return len(self.sources) == 1 and isinstance(self.sources[0], Dense)

    @property
    def dense_gradient(self) -> Tensor:
        """(B, *shape), where that is so."""
        (source,) = self.sources
        assert isinstance(source, Dense)
        return source.grad

    def measure(self, users: int, room: int, *, again: Scratch | None = None) -> list[Measured]:
        """See `measure_all`."""
        return measure_all([self], users, room, again=again)[0]

    @property
    def made_each(self) -> int:
        """Numbers that are computed for each user only to look at its uses."""
        return sum(getattr(s, "numbers_each", 0) for s in self.sources)

    def measured(self, users: int, room: int, whole: Ways | None) -> list[Measured]:
        """‖g_b‖² of this parameter; `whole` are the ways of all users, if they are known."""
        each = self.made_each + self.parameter.numel()
        kept = users * each <= room
        if whole is not None and whole.all_few:
            return [self.by_rows(whole)]
        if whole is not None and kept:
            return [self.wrote(whole, 0, kept)]
        self.step = users if kept else max(1, KEEP // max(1, each))
        return [self._measured(a, min(a + self.step, users), kept) for a in range(0, users, self.step)]

    @property
    def computes_anew(self) -> bool:
        """Whether gradients come out otherwise when they are computed for all users together."""
        return any(getattr(source, "computes_anew", False) for source in self.sources)

    def uses(self, a: int, b: int) -> list[Use]:
        """Of some users."""
        return joined([s.part(a, b) for s in self.sources])

    def by_rows(self, ways: Ways) -> Measured:
        """Of all users, whose rows are few; those that are zero are not needed for the sum either."""
        short = without_zeros(ways.uses, ways.lengths)
        if len(self.sources) == 1 and isinstance(short[0], Outer):
            self.sources = [short[0]]
        return Measured(self, ways.uses, ways.lengths, squared_by_gram(short), 0)

    def _measured(self, a: int, b: int, kept: bool) -> Measured:
        (ways,) = ways_of([self.uses(a, b)])
        if ways.all_few:
            return Measured(self, ways.uses, ways.lengths, squared_by_gram(without_zeros(ways.uses, ways.lengths)), a)
        return self.wrote(ways, a, kept)

    def at_once(self, use: Outer, users: int, room: int) -> Measured | None:
        """One outer product, by compiled code that looks at the rows and multiplies them; None if it cannot."""
        if users * self.parameter.numel() > room or not can_multiply(use.left, use.right):
            return None
        most = reach([use])
        told, made = measured_products(use.left, use.right, most, keep=self.again is None)
        few = told[:, 1] < most
        ways = Ways([use], lengths_of(told[None]), few, made is None, bool(few.any()))
        return self.by_rows(ways) if made is None else self.wrote(ways, 0, True, made)

    def wrote(self, ways: Ways, first: int, kept: bool, made: tuple[Tensor, Tensor] | None = None) -> Measured:
        """Gradients written out here, or by others before (`made`, with their squares)."""
        uses, lengths, few, mixed = ways.uses, ways.lengths, ways.few, ways.any_few  # the way is everybody's own
        written, square = made or squared_gradients(
            [some_of(use, ~few) for use in uses] if mixed and not kept else uses
        )
        if mixed:
            others, square = square, square.new_empty(len(few))
            gram, rest = torch.from_numpy(few), torch.from_numpy(~few)
            square[rest] = others if len(others) < len(few) else others[rest]
            square[gram] = squared_by_gram(without_zeros(uses, lengths, few))
        if kept:
            self.room = len(few) * self.parameter.numel()
            if self.again is None:
                self.written, self.sources = written.view(len(written), *self.parameter.shape), []
        return Measured(self, uses, lengths, square, first)

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        """out += Σ_b c_b g_b."""
        shared = c
        if self.alone:
            shared = c.clone()
            shared[list(self.alone)] = 0
        if self.written is not None:
            self._but_alone(self.written).add_sum(shared, out)
        elif self.room:
            self._but_alone(self._written_again(len(c))).add_sum(shared, out)
        elif self.computes_anew or (self.step and native.multiplies()):
            step = self.step if self.computes_anew else min(self.step, max(1, A_FEW // self.parameter.numel()))
            for a in range(0, len(c), step):  # the very numbers whose norms were taken, as if they had been kept
                b = min(a + step, len(c))
                self._but_alone(written_out(self.uses(a, b)), a).add_sum(shared[a:b], out)
        else:
            for source in self.sources:
                source.add_sum(shared, out)
        for user, own in self.alone.items():
            gradient = written_in_double(own)[0].to(out.device)
            out += (c[user] * gradient).to(out.dtype)

    def _written_again(self, users: int) -> Tensor:
        uses = self.uses(0, users)
        if self.again is None or len(uses) > 1 or not isinstance(uses[0], Outer):
            return written_out(uses)
        return self.again.products(uses[0].left, uses[0].right).view(users, *self.parameter.shape)

    def _but_alone(self, written: Tensor, first: int = 0) -> Dense:
        """Gradients of users from `first` on, without those added up in float64: theirs may have overflowed here."""
        here = [user - first for user in self.alone if first <= user < first + len(written)]
        if here:
            written = written.index_fill(0, torch.tensor(here, device=written.device), 0)
        return Dense(written)

    def weighted_sum(self, c: Tensor) -> Tensor:
        """Σ_b c_b g_b."""
        dtype = torch.promote_types(self.parameter.dtype, c.dtype)  # complex, if the parameter is
        out = torch.zeros(self.parameter.shape, dtype=dtype, device=c.device)
        self.add_sum(c, out)
        return out

    def keep(self, users: Tensor) -> None:
        """Forgets every user that is not kept."""
        if self.written is not None:
            self.written = self.written.masked_fill(~users.reshape(-1, *[1] * (self.written.ndim - 1)), 0)
        self.alone = {user: own for user, own in self.alone.items() if bool(users[user])}
        for source in self.sources:
            source.keep(users)


@dataclass
class Measured:
    """‖g_b‖² of one parameter for users from `first` on, as computed; `uses` are theirs."""

    group: ParameterUses
    uses: list[Use]
    lengths: RowLengths
    square: Tensor  # (n,) in `wide` precision
    first: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the uses."""
        return tensor_of(self.uses[0]).dtype

    def in_double(self, user: int) -> Tensor:
        """() of one user again, in float64: its rows cancel, and are added up in float64 too."""
        own = [use.part(user, user + 1) for use in self.uses]
        self.group.alone[self.first + user] = own
        return sums_of_squares(written_in_double(own).reshape(1, -1))[0]


@dataclass(slots=True)
class Ways:
    """The uses of one parameter by some users, and whose norms come from inner products."""

    uses: list[Use]
    lengths: RowLengths
    few: np.ndarray  # (B,)
    all_few: bool
    any_few: bool


def ways_of(many: Sequence[list[Use]]) -> list[Ways]:
    """Of many parameters, used by the same users."""
    if not many:
        return []
    lengths = row_lengths(many)
    return [_way(uses, own) for uses, own in zip(many, lengths, strict=True)]


def _way(uses: list[Use], lengths: RowLengths) -> Ways:
    few = _counted(uses, lengths) < reach(uses)
    return Ways(uses, lengths, few, bool(few.all()), bool(few.any()))


def _counted(uses: Sequence[Use], lengths: RowLengths) -> np.ndarray:
    """(B,) rows that decide the way."""
    first, *others = by_rows(uses)
    rows = lengths.counts[first]
    for other in others:
        rows = rows + lengths.counts[other]
    return rows


def measure_all(
    groups: Sequence[ParameterUses], users: int, room: int, *, again: Scratch | None = None
) -> list[list[Measured]]:
    """‖g_b‖² of each parameter; written-out gradients are kept (or made `again`) while `room` is enough."""
    for group in groups:
        group.again = again if group.made_each == 0 and not group.computes_anew else None
    at_once = {n: group.uses(0, users) for n, group in enumerate(groups) if group.made_each == 0}
    together = [n for n, uses in at_once.items() if not is_plain(uses)]
    whole = dict(zip(together, ways_of([at_once[n] for n in together]), strict=True))
    found = []
    for n, group in enumerate(groups):
        one = None
        if n in at_once and n not in whole:  # compiled code reads the rows just before they are multiplied
            if len(at_once[n]) == 1 and isinstance(use := at_once[n][0], Outer):
                one = group.at_once(use, users, room)
            if one is None:
                (whole[n],) = ways_of([at_once[n]])
        found.append(group.measured(users, room, whole.get(n)) if one is None else [one])
        room -= group.room
    return found


def raised_squares(measured: Sequence[Measured]) -> tuple[np.ndarray, np.ndarray]:
    """(G, n) ‖g_b‖² of each parameter, of the same users and precision, and what it is at most, whatever rounding did:
    a bound made of a user's own rows alone.

    Too few digits are made good one user at a time.
    """
    known = torch.stack([m.square for m in measured]).cpu().double().numpy()
    large = None
    if any(m.lengths.large is not None for m in measured):
        none = np.zeros(known.shape[1], dtype=bool)
        large = np.stack([none if m.lengths.large is None else m.lengths.large for m in measured])
    again = [m.in_double for m in measured]
    return raise_squares(
        known, Rows.of(measured, measured[0].dtype), large, lambda place, user: float(again[place](user))
    )


@np.errstate(all="ignore")
def raise_squares(
    known: np.ndarray, rows: Rows, large: np.ndarray | None, in_double: Callable[[int, int], float]
) -> tuple[np.ndarray, np.ndarray]:
    """(G, n) squares, changed where they have too few digits, and what they are at most.

    Args:
        large: (G, n) whether a factor times a user's row may overflow, and one times its other side vanish.
        in_double: the square of a parameter and a user again, in float64.
    """
    error = square_error(known, rows)
    enough = (error <= LOOSE * known) & (rows.lengths**2 <= CANCEL**2 * known) & np.isfinite(known)
    if large is not None:
        enough &= ~large
    if not enough.all():
        for place, user in np.argwhere(~enough).tolist():
            known[place, user] = in_double(place, user)
        error = square_error(known, rows)
    most = LOOSE * known
    return known, known + np.where(error <= most, error, most)


def joined(uses: Sequence[Use]) -> list[Use]:
    """Uses of one kind become one, but for what is written out: added up, parts that cancel would be seen no more."""
    if len(uses) == 1:
        return list(uses)
    out: list[Use] = [u for u in uses if isinstance(u, Ragged)]
    outers = [u for u in uses if isinstance(u, Outer)]
    for width in {u.left.shape[2] for u in outers}:  # a reshaped weight has another split of the same numbers
        out.append(Outer.join([u for u in outers if u.left.shape[2] == width]))
    if lookups := [u for u in uses if isinstance(u, Lookup)]:
        out.append(Lookup.join(lookups))
    return out + [u for u in uses if isinstance(u, Dense)]


def written_out(uses: Sequence[Use]) -> Tensor:
    """(B, *shape): the gradients of all uses together. A product is written first, the rest is added to it."""
    first, *rest = uses
    total = first.dense()
    if rest and isinstance(first, Dense):
        total = total.clone()
    for other in rest:
        other.add_to(total)
    return total


def squared_gradients(uses: Sequence[Use]) -> tuple[Tensor, Tensor]:
    """The same, and ‖g_b‖², (B,) in `wide` precision."""
    first, *rest = uses
    square = None
    if isinstance(first, (Outer, Ragged)) and (not rest or (len(rest) == 1 and isinstance(rest[0], Lookup))):
        written, square = first.squared_dense()
        if rest:
            square = added(rest[0], written, square)
    else:
        written = written_out(uses)
    return written, sums_of_squares(written.reshape(len(written), -1)) if square is None else square


def added(lookup: Use, written: Tensor, square: Tensor | None) -> Tensor | None:
    """Adds what a table's other use contributes, and follows the squares, if they lose no digits by it.

    Squares of products carry at most 600 roundings in float32; twice as many are within what is allowed to the square
    of 4,096 numbers (`rounding`). Whose digits are lost is decided for each user by itself.
    """
    if square is None or not isinstance(lookup, Lookup) or written[0].numel() < PIECE or not lookup.is_plain:
        lookup.add_to(written)
        return None
    before = square.clone()
    lookup.add_compiled(written, square)
    lost = ~(before <= 2 * square)
    if bool(lost.any()):
        square[lost] = sums_of_squares(written[lost].reshape(int(lost.sum()), -1))
    return square


def written_in_double(uses: Sequence[Use]) -> Tensor:
    """The gradients of all uses together in float64, on the CPU: not every device has it, and few users need it."""
    return written_out([replace(use, **_in_double(use)) for use in uses])


def _in_double(use: Use) -> dict[str, Any]:
    tensors = {name: t for name, t in vars(use).items() if isinstance(t, Tensor)}
    whole = {name: t.cpu() for name, t in tensors.items() if t.dtype == torch.int64}
    return whole | {
        name: t.to("cpu", torch.promote_types(t.dtype, torch.float64))
        for name, t in tensors.items()
        if name not in whole
    }


def squared_by_gram(uses: Sequence[Use]) -> Tensor:
    """(B,) Σ over pairs of ⟨g⁽ᵃ⁾, g⁽ᵃ'⟩."""
    total = torch.stack([squared(use) for use in uses]).sum(0)
    for i, one in enumerate(uses):
        for other in uses[i + 1 :]:
            total = total + 2 * inner(one, other)
    return total


def by_parameter(pairs: Iterable[tuple[Tensor, Source]], trainable: set[int]) -> list[ParameterUses]:
    """Groups uses by parameter; uses of expressions are handed on to the parameters they are made of."""
    direct: dict[int, tuple[Tensor, list[Source]]] = {}
    expressions: dict[int, tuple[Tensor, list[Source]]] = {}
    for target, source in pairs:
        home = direct if id(target) in trainable else expressions
        home.setdefault(id(target), (target, []))[1].append(source)
    for z, sources in expressions.values():
        for parameter in leaves(z):
            if id(parameter) in trainable:
                direct.setdefault(id(parameter), (parameter, []))[1].append(Expression(z, parameter, sources))
    return [ParameterUses(parameter, sources) for parameter, sources in direct.values()]
