"""Rows picked out of users' rows: `hidden[mask]`, `hidden[token_index]`, the tokens that a router sends to an expert.

Such a tensor has rows of users in any number and order, so dividing them evenly would give them to the wrong users.
The gate therefore remembers, for every tensor that was picked and for what is computed from it row by row, which row of
the batch each of its rows came from. Where that is lost (a sum over rows, say), a parameter that meets it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.moves import cuts_batch, reorders, writes_along_batch
from dpformer.clipping.turned import RESHAPES, batch_of, is_turned
from dpformer.clipping.user_rows import Packed, UserRows


@dataclass(frozen=True)
class Picked:
    """Row n is row `index[n]` of a tensor with `total` rows that are users' in order (or packed)."""

    index: Tensor | None  # (N,) int64; None where it is lost
    total: int
    packed: Packed | None

    def user_of_row(self, rows: UserRows) -> Tensor:
        """(N,) the user of each row."""
        assert self.index is not None
        base = UserRows(rows.users, self.packed, rows.where)
        return base.user_of_row(self.total, self.index.device)[self.index]

    def at(self, index: Any) -> Picked:
        """Picked once more."""
        return self if self.index is None else Picked(self.index[index], self.total, self.packed)

    @property
    def lost(self) -> Picked:
        return Picked(None, self.total, self.packed)

    @property
    def is_whole(self) -> bool:
        """All rows in order: nothing was picked after all."""
        index = self.index
        if index is None or len(index) != self.total:
            return False
        return bool((index == torch.arange(self.total, device=index.device)).all())

    def same(self, other: Picked | None) -> bool:
        """The same rows in the same order."""
        if other is None or (other.total, other.packed) != (self.total, self.packed):
            return False
        if self.index is None or other.index is None:
            return self.index is other.index
        return self.index is other.index or torch.equal(self.index, other.index)


def picked(t: Any) -> Picked | None:
    """How the rows of a tensor were picked; None for rows that are users' in order."""
    return getattr(t, "_phantom_picked", None)


def mark(t: Tensor, how: Picked | None) -> None:
    if t.ndim:
        t._phantom_picked = None if how is None or how.is_whole else how  # type: ignore[attr-defined]


def is_computed(t: Tensor) -> bool:
    """Whether a tensor was made inside the context; False for raw samples, which come from outside."""
    return getattr(t, "_phantom_computed", False)


def mark_computed(t: Tensor) -> Tensor:
    t._phantom_computed = True  # type: ignore[attr-defined]
    return t


def follow_raw(func: Any, tensors: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """What is computed from tensors is computed; raw samples that are only picked or moved stay raw."""
    if not tensors or (func in _STAY_RAW and not is_computed(tensors[0])):
        return
    given = {id(t) for t in tensors}
    for t in out:
        if id(t) not in given:
            mark_computed(t)


def _named(names: str) -> set[Any]:
    return {getattr(home, name) for home in (torch, Tensor) for name in names.split() if hasattr(home, name)}


_SELECTS = _named("index_select")
_MASKED = _named("masked_select")
_TABLES = {F.embedding, torch.embedding}  # of users' rows
_GATHERS, _ALONG, _TAKES = _named("gather"), _named("take_along_dim"), _named("take")
_ELEMENTS = _GATHERS | _ALONG | _TAKES  # along the first dimension each number comes from a row of its own
_STAY_RAW = _SELECTS | _named("__getitem__ to cpu cuda pin_memory clone contiguous")
PICKS = _STAY_RAW | _MASKED | _TABLES | _ELEMENTS  # pick rows, or leave raw samples raw
_JOINS = _named("cat concat concatenate")
# Functions that write rows into their first argument, whose rows stay whose they are.
_INTO_FIRST = _named("index_add index_copy index_put index_fill scatter scatter_add scatter_reduce masked_scatter")


def follow(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    out: Any,
    packed: Packed | None,
    is_public: Callable[[Tensor], bool],
) -> bool:
    """Says of what a function has made out of users' data how its rows were picked.

    Returns whether that cannot be said, so that only the proof of this very batch can tell.

    Args:
        is_public: whether a tensor holds no users' rows; out of such a one none are picked.
    """
    source, index = _pick_of(func, args, kwargs) if func in PICKS else (None, None)
    doubtful = False
    if isinstance(source, Tensor) and not is_public(source):
        doubtful = index is None and is_computed(source) and _may_mix(func, source, args, kwargs, is_public)
        if index is not None and func in _ELEMENTS:
            return is_computed(source)
        if index is not None and isinstance(out, Tensor) and not _picks_batch(source, index):
            _mark_picked(source, out, index, packed)
            return False
    sources = [t for t in tensors if picked(t) is not None]
    if not sources:
        return doubtful

    def of_users(t: Tensor) -> bool:
        return is_computed(t) and not is_public(t)

    joins = (args[0] if args else kwargs["tensors"]) if func in _JOINS else None
    if joins is not None and out.shape[0] == sum(len(t) for t in joins):
        mark(out, _joined(joins))
        return doubtful
    if func in _INTO_FIRST:
        doubtful |= written_among(func, args, kwargs, tensors, of_users)
        sources = [t for t in args[:1] if picked(t) is not None]
    else:
        doubtful |= disagree(sources[0], tensors, of_users)
    _carry(func, args, sources, out)
    return doubtful


def disagree(one: Tensor, tensors: Sequence[Tensor], of_users: Callable[[Tensor], bool]) -> bool:
    """Whether rows of users meet as many other ones that were picked otherwise, or not at all."""
    how = picked(one)
    return how is not None and any(
        t is not one and t.ndim and t.shape[0] == one.shape[0] and of_users(t) and not how.same(picked(t))
        for t in tensors
    )


def written_among(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    of_users: Callable[[Tensor], bool],
) -> bool:
    """Whether rows of users are written among rows that were picked otherwise; along the batch, moves.py decides."""
    target = kwargs.get("out", args[0] if args else kwargs.get("input"))
    if not isinstance(target, Tensor) or writes_along_batch(func, args, kwargs):
        return False
    how = picked(target)
    others = [t for t in tensors if t is not target and of_users(t) and t.ndim]
    return any(not other.same(how) for other in map(picked, others) if other is not None) or (
        how is not None and disagree(target, others, of_users)
    )


def _picks_batch(source: Tensor, index: Tensor) -> bool:
    """`model(data[users])`: raw samples picked one by one are the batch itself, whatever they were picked from.

    What was computed inside the context is no longer raw, with or without gradient: its rows are users' rows already.
    """
    raw = not source.requires_grad and not is_computed(source)
    return raw and index.ndim == 1 and picked(source) is None


def _pick_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tensor | None]:
    """The tensor that rows are picked out of, and what picks them, numbers or booleans; None if all stay in order."""

    def given(place: int, name: str) -> Any:
        return args[place] if len(args) > place else kwargs.get(name)

    if func in _TABLES:
        table, ids = (given(1, "weight"), given(0, "input")) if func is F.embedding else (args[0], given(1, "indices"))
        return table, ids if ids.ndim == 1 else None
    source = given(0, "input")
    if func in _SELECTS:
        return source, given(2, "index") if given(1, "dim") in (0, -source.ndim) else None
    if func in _MASKED:
        return source, given(1, "mask")
    if func in _ELEMENTS:
        return source, _element_index(func, source, given)
    if func is not Tensor.__getitem__:
        return source, None
    first, *rest = args[1] if isinstance(args[1], tuple) and args[1] else (args[1],)
    if isinstance(first, (list, range)) and all(isinstance(place, (bool, int, np.integer)) for place in first):
        first = torch.tensor(list(first))
    elif isinstance(first, np.ndarray):
        first = torch.as_tensor(first)
    if not isinstance(first, Tensor) or not first.ndim:
        return source, None
    if first.dtype == torch.bool:
        return source, first
    single = first.ndim == 1 and all(k.ndim <= 1 for k in rest if isinstance(k, Tensor))
    return source, first if single else None


def _may_mix(
    func: Any, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], is_public: Callable[[Tensor], bool]
) -> bool:
    """Whether users change places in a way that is not followed: one at a time, a few in a slice, along the second
    dimension of data that is turned time first, or by a key of several dimensions, of `None` or of dots."""
    if func in _TABLES:
        return True
    if func in _SELECTS:
        index = args[2] if len(args) > 2 else kwargs.get("index")
        along = (args[1] if len(args) > 1 else kwargs.get("dim")) in (1, 1 - source.ndim)
        return (is_turned(source) and along) or (isinstance(index, Tensor) and not is_public(index))
    if func is not Tensor.__getitem__:
        return False
    first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    if picked(source) is not None and isinstance(first, slice):  # followed
        return False
    return cuts_batch(source, args[1]) or reorders(source, args[1], is_public)


def _element_index(func: Any, source: Tensor, given: Callable[[int, str], Any]) -> Tensor | None:
    """What picks numbers out of other rows; None if each stays in its row."""
    if func in _TAKES:
        return given(1, "index")
    place, dim = (2, given(1, "dim")) if func in _GATHERS else (1, given(2, "dim"))
    batch = batch_of(source)  # steps of time are each of their own user
    return given(place, "index" if place == 2 else "indices") if dim in (None, batch, batch - source.ndim) else None


def _mark_picked(source: Tensor, out: Tensor, index: Tensor, packed: Packed | None) -> None:
    if index.dtype == torch.bool:
        index = index.nonzero()[:, 0]
    before = picked(source)
    if before is None:
        total = source.shape[0]
        own = packed if packed is not None and len(packed.user) == total else None
        before = Picked(torch.arange(total, device=source.device), total, own)
    how = before.at(index.long())
    mark(out, how if how.index is None or len(how.index) == out.shape[0] else how.lost)


def _carry(func: Any, args: Sequence[Any], sources: Sequence[Tensor], out: Any) -> None:
    for t in out if isinstance(out, (tuple, list)) else (out,):
        if not isinstance(t, Tensor) or not t.ndim:
            continue
        same = [picked(s) for s in sources if s.ndim and s.shape[0] == t.shape[0]]
        if func is Tensor.__getitem__:
            mark(t, _sliced(args[0], args[1]))
        elif func in RESHAPES and sources:
            mark(t, _reshaped(picked(sources[0]), sources[0].shape[0], t.shape[0]))
        elif same:
            mark(t, same[0])
        elif sources:
            how = picked(sources[0])
            mark(t, None if how is None else how.lost)


def _sliced(source: Tensor, key: Any) -> Picked | None:
    """`t[a:b]` and `t[:, …]` of a picked tensor."""
    how, first = picked(source), key[0] if isinstance(key, tuple) and key else key
    if how is None or first is Ellipsis:
        return how
    return how.at(first) if isinstance(first, slice) else how.lost


def _joined(parts: Sequence[Tensor]) -> Picked:
    """One after the other, as torch.cat puts them; lost if they are not all picked out of the same rows."""
    first = next(how for how in map(picked, parts) if how is not None)
    indices = []
    for part in parts:
        how = picked(part) or Picked(torch.arange(len(part), device=part.device), len(part), first.packed)
        if how.index is None or (how.total, how.packed) != (first.total, first.packed):
            return first.lost
        indices.append(how.index)
    return Picked(torch.cat(indices), first.total, first.packed)


def _reshaped(how: Picked | None, before: int, after: int) -> Picked | None:
    if how is None or how.index is None or before == after:
        return how
    if before and after % before == 0:
        return Picked(how.index.repeat_interleave(after // before), how.total, how.packed)
    if after and before % after == 0:
        grouped = how.index.view(after, -1)
        if bool((grouped == grouped[:, :1]).all()):
            return Picked(grouped[:, 0], how.total, how.packed)
    return how.lost


def by_user(build: Callable[[Tensor, UserRows], Any], how: Picked) -> Callable[[Tensor, UserRows], Any]:
    """A builder of uses that knows the user of each picked row."""

    def built(grad: Tensor, rows: UserRows) -> Any:
        return build(grad, UserRows(rows.users, Packed.of(how.user_of_row(rows)), rows.where))

    return built
