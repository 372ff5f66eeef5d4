"""Users' rows that a function may put in other places, in a way that nobody follows.

A `stack` of single rows in the order of their lengths, `index_copy`, a product with a one-hot matrix: whose row is
whose can change from batch to batch while all sizes stay the same, so only the proof of that very batch can tell.

Functions along other dimensions than the batch's leave rows where they are: that is what most of this looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

Told = Callable[[Tensor], bool]


def _named(names: str) -> list[Any]:
    return [getattr(home, name) for home in (torch, Tensor) for name in names.split() if hasattr(home, name)]


# Where a function is told along which dimension it works: the place of that argument, and what holds without it.
_ALONG: dict[Any, tuple[int, Any]] = {
    **dict.fromkeys(_named("unbind"), (1, 0)),
    **dict.fromkeys(_named("split split_with_sizes chunk tensor_split unsafe_chunk unsafe_split"), (2, 0)),
    **dict.fromkeys(_named("select_scatter slice_scatter"), (2, 0)),
    **dict.fromkeys(_named("select narrow narrow_copy unfold flip as_strided"), (1, None)),
    **dict.fromkeys(_named("sort argsort"), (1, -1)),
    **dict.fromkeys(_named("topk kthvalue"), (2, -1)),
    **dict.fromkeys(_named("roll repeat_interleave"), (2, None)),
    **dict.fromkeys(_named("rot90"), (2, (0, 1))),
    **dict.fromkeys(_named("msort flipud vsplit"), (99, 0)),
    **dict.fromkeys(_named("fliplr hsplit"), (99, 1)),
}
_REPEATS = _named("repeat_interleave")
_INTO = _named("index_add index_copy index_fill index_reduce scatter scatter_add scatter_reduce")
_INTO_ANYWHERE = _named("index_put masked_scatter put")
_WRITES = {getattr(Tensor, f"{f.__name__}_"): f for f in _INTO + _INTO_ANYWHERE if hasattr(Tensor, f"{f.__name__}_")}
_PRODUCTS = _named("matmul mm mv dot inner addmm addmv __matmul__")
MOVES = {
    *_ALONG, *_INTO, *_INTO_ANYWHERE, *_WRITES, *_PRODUCTS,
    Tensor.__setitem__, Tensor.__rmatmul__, torch.einsum, torch.tensordot, torch.linalg.multi_dot,
}  # fmt: skip


def may_move(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of_users: Told, user_of_row: Tensor | None = None
) -> bool:
    """Whether rows that were computed from users' data may go to other places.

    Args:
        func: one of `MOVES`.
        of_users: whether a tensor was computed from users' data.
        user_of_row: of packed rows.
    """
    if func in _PRODUCTS:  # a second factor's first dimension is summed over, unless it has three
        factors = [*args, *kwargs.values()]
        return any(isinstance(t, Tensor) and t.ndim <= 2 and of_users(t) for t in factors[1:][-2:])
    if func in _ALONG:
        return _moves_along(func, args, kwargs, of_users)
    if func is torch.einsum:
        return not _keeps_batch(args, of_users)
    if func is Tensor.__setitem__:
        return _any_of_users((args[0], args[2]), of_users) and cuts_batch(args[0], args[1])
    if _WRITES.get(func, func) in _INTO:
        return _moves_into(args, kwargs, of_users, user_of_row)
    return _any_of_users([*args, *kwargs.values()], of_users)


def cuts_batch(source: Tensor, key: Any, is_public: Told = lambda _: False) -> bool:
    """Whether a key takes some of the rows of a batch, or all in an order of its own that is not public."""
    keys = key if isinstance(key, tuple) else (key,)
    dots = next((place for place, one in enumerate(keys) if one is Ellipsis), None)
    if dots is not None:  # keys behind dots belong to the last dimensions
        behind = keys[dots + 1 :]
        keys = (*keys[:dots], *[slice(None)] * (source.ndim - dots - len(behind)), *behind)
    batch = _batch_of(source)
    rows = [one for one in keys if one is not None][batch : batch + 1]
    if not rows:
        return False
    if isinstance(rows[0], slice):
        return rows[0].indices(source.shape[batch]) != (0, source.shape[batch], 1)
    if isinstance(rows[0], Tensor):
        return not is_public(rows[0])
    return isinstance(rows[0], (int, np.integer, list, tuple, range, np.ndarray))


def _moves_along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of_users: Told) -> bool:
    place, dims = _ALONG[func]
    source = args[0] if args else kwargs["input"]
    if not of_users(source):
        return False
    if func in _REPEATS and not isinstance(args[1] if len(args) > 1 else kwargs.get("repeats"), Tensor):
        return False  # each row as often as any other
    for name in ("dim", "dims", "dimension"):
        dims = kwargs.get(name, dims)
    if len(args) > place:
        dims = args[place:] if func is Tensor.flip else args[place]
    return _meets_batch(source, dims)


def _moves_into(args: tuple[Any, ...], kwargs: dict[str, Any], of_users: Told, user_of_row: Tensor | None) -> bool:
    """`index_add(input, dim, index, source)` and its kin."""
    given = dict(zip(("input", "dim", "index", "source"), args, strict=False)) | kwargs
    target, index, source = given.get("input"), given.get("index"), given.get("source", given.get("src"))
    if not isinstance(target, Tensor) or not _any_of_users((target, source), of_users):
        return False
    if not _meets_batch(target, given.get("dim")):
        return False
    if not isinstance(index, Tensor) or not isinstance(source, Tensor):
        return True
    return not any(torch.equal(known, index) for known in _places(source, len(target), user_of_row))


def _places(source: Tensor, rows: int, user_of_row: Tensor | None) -> Iterator[Tensor]:
    """Where rows may be put and stay whose they are: where they were picked, and at the place of their user."""
    if user_of_row is not None:
        yield user_of_row
    how = getattr(source, "_phantom_picked", None)
    if how is not None and how.index is not None and how.packed is None and rows and how.total % rows == 0:
        yield how.index // (how.total // rows)


def _keeps_batch(args: tuple[Any, ...], of_users: Told) -> bool:
    """Whether users' operands of an einsum have their batch where the result has it."""
    if not isinstance(args[0], str) or "->" not in args[0]:
        return False
    inputs, result = args[0].replace(" ", "").split("->")
    operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    return all(
        letters[_batch_of(t) :][:1] in (result[:1], result[_batch_of(t) :][:1])
        for letters, t in zip(inputs.split(","), operands, strict=False)
        if of_users(t)
    )


def _batch_of(source: Tensor) -> int:
    """The dimension of the batch: the second one of data that was turned time first."""
    return 1 if getattr(source, "_phantom_turned", False) else 0


def _meets_batch(source: Tensor, dims: Any) -> bool:
    """Whether the dimension of the batch may be among these; None are all."""
    some = dims if isinstance(dims, (tuple, list)) else (dims,)
    if len(some) == 1 and isinstance(some[0], (tuple, list)):
        (some,) = some
    away = [isinstance(d, int) and d % max(1, source.ndim) != _batch_of(source) for d in some]
    return not away or not all(away)


def _any_of_users(values: Iterable[Any], of_users: Told) -> bool:
    return any(isinstance(t, Tensor) and of_users(t) for t in values)
