"""Users' rows that a function may put in other places, in a way that nobody follows.

A `stack` of single rows in the order of their lengths, `index_copy`, a product with a one-hot matrix: whose row is
whose can change from batch to batch while all sizes stay the same, so only the proof of that very batch can tell.

Functions along other dimensions than the batch's leave rows where they are: that is what most of this looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.turned import batch_of

Told = Callable[[Tensor], bool]


def _named(names: str) -> list[Any]:
    return [getattr(home, name) for home in (torch, Tensor) for name in names.split() if hasattr(home, name)]


# Where a function is told along which dimension it works: the place of that argument, and what holds without it.
_ALONG: dict[Any, tuple[int, Any]] = {
    **dict.fromkeys(_named("unbind unbind_copy slice_copy"), (1, 0)),
    **dict.fromkeys(_named("unsqueeze unsqueeze_"), (1, None)),  # the batch is then another dimension
    **dict.fromkeys(_named("split split_copy split_with_sizes chunk tensor_split unsafe_chunk unsafe_split"), (2, 0)),
    **dict.fromkeys(_named("select_scatter slice_scatter"), (2, 0)),
    **dict.fromkeys(_named("select narrow narrow_copy select_copy unfold flip"), (1, None)),
    **dict.fromkeys(_named("sort argsort"), (1, -1)),
    **dict.fromkeys(_named("topk kthvalue"), (2, -1)),
    **dict.fromkeys(_named("roll repeat_interleave"), (2, None)),
    **dict.fromkeys(_named("rot90"), (2, (0, 1))),
    **dict.fromkeys(_named("msort flipud vsplit"), (99, 0)),
    **dict.fromkeys(_named("fliplr hsplit"), (99, 1)),
}
_REPEATS = _named("repeat_interleave")
SHAPES = _named("view reshape")
_INTO = _named("index_add index_copy index_fill index_reduce scatter scatter_add scatter_reduce")
_INTO_ANYWHERE = _named("index_put masked_scatter put")
_WRITES = {getattr(Tensor, f"{f.__name__}_"): f for f in _INTO + _INTO_ANYWHERE if hasattr(Tensor, f"{f.__name__}_")}
_PRODUCTS = {
    *_named("matmul mm mv dot inner bmm addmm addmv baddbmm addmm_ addmv_ baddbmm_ __matmul__"),
    torch.linalg.matmul, torch.sparse.mm,
}  # fmt: skip
MOVES = {
    *_ALONG, *_INTO, *_INTO_ANYWHERE, *_WRITES, *_PRODUCTS, Tensor.__setitem__, Tensor.__rmatmul__, torch.einsum,
    torch.tensordot, torch.linalg.multi_dot, torch.chain_matmul, torch.sparse.addmm, F.linear, F.embedding_bag,
    torch.addbmm, Tensor.addbmm, Tensor.addbmm_, *SHAPES,
    *_named("transpose_ t_ swapaxes_ swapdims_ as_strided as_strided_ set_ resize_"),
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
    if func in _PRODUCTS:
        return _sums_batch(args, kwargs, of_users)
    if func in (F.linear, F.embedding_bag):  # users' rows as a weight, or as a table
        return _any_of_users([*args[1:2], kwargs.get("weight")], of_users)
    if func in _ALONG:
        return _moves_along(func, args, kwargs, of_users)
    if func in SHAPES:  # (B, …) → (1, B, …)
        source = args[0] if args else kwargs["input"]
        sizes = kwargs.get("shape", args[1] if len(args) == 2 else args[1:])
        first = sizes[0] if isinstance(sizes, (tuple, list)) and sizes else None
        return first == 1 and source.ndim > 0 and source.shape[0] != 1 and of_users(source)
    if func is torch.einsum:
        return not _keeps_batch(args, of_users)
    if func is Tensor.__setitem__:
        target, key, value = args
        if not isinstance(value, Tensor) or not _any_of_users((target, value), of_users):
            return False  # a number moves no rows
        return cuts_batch(target, key) and not _goes_back(target, key, value)
    if _WRITES.get(func, func) in _INTO:
        return _moves_into(args, kwargs, of_users, user_of_row)
    nested = [one for one in [*args, *kwargs.values()] if isinstance(one, (list, tuple))]  # multi_dot
    return _any_of_users([*args, *kwargs.values(), *chain(*nested)], of_users)


def cuts_batch(source: Tensor, key: Any) -> bool:
    """Whether a key takes some of the rows of a batch, or all in an order of its own."""
    keys, batch = _keys(source, key), batch_of(source)
    if any(one is None for one in keys[: batch + 1]):
        return True  # the batch is then another dimension
    own = keys[batch : batch + 1]
    if not own:
        return False
    size = source.shape[batch]
    if isinstance(own[0], slice):
        return own[0].indices(size) != (0, size, 1)
    if isinstance(own[0], Tensor) and batch == 0 and _is_range(own[0], size):
        return False
    return isinstance(own[0], (int, np.integer, list, tuple, range, np.ndarray, Tensor))


def _is_range(key: Tensor, size: int) -> bool:
    """0, 1, 2, … along the first dimension: each row takes of itself."""
    if key.dtype == torch.bool or key.shape != (size, *[1] * (key.ndim - 1)):
        return False
    return torch.equal(key.flatten(), torch.arange(size, dtype=key.dtype, device=key.device))


def reorders(source: Tensor, key: Any, is_public: Told) -> bool:
    """Whether a key puts another dimension in an order of users' data: it may be the batch after all."""
    for size, own in zip(source.shape, [one for one in _keys(source, key) if one is not None], strict=False):
        if isinstance(own, Tensor) and own.ndim and own.dtype != torch.bool and not is_public(own):
            return True
        if isinstance(own, (list, tuple, range, np.ndarray)) and len(own) == size > 1:
            return True
    return False


def writes_along_batch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this is one of the functions that put rows into a batch, at places that they are told."""
    if func is Tensor.__setitem__:
        return cuts_batch(args[0], args[1])
    if _WRITES.get(func, func) not in _INTO:
        return func in _WRITES or func in _INTO_ANYWHERE
    target, source = args[0] if args else kwargs.get("input"), args[3] if len(args) > 3 else kwargs.get("source")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return any(isinstance(t, Tensor) and _meets_batch(t, dim) for t in (target, source))


def _keys(source: Tensor, key: Any) -> list[Any]:
    """One for each dimension, of the first ones at least, and None for new ones."""
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = next((place for place, one in enumerate(keys) if one is Ellipsis), None)
    if dots is not None:  # keys behind dots belong to the last dimensions
        given = sum(one is not None for one in keys) - 1
        keys[dots : dots + 1] = [slice(None)] * (source.ndim - given)
    return keys


def _goes_back(target: Tensor, key: Any, value: Tensor) -> bool:
    """`out[mask] = expert(h[mask])`: rows stay whose they are."""
    if not isinstance(key, Tensor) or key.ndim != 1:
        return False
    index = key.nonzero()[:, 0] if key.dtype == torch.bool else key
    return _stays(target, index, value, None)


def _sums_batch(args: tuple[Any, ...], kwargs: dict[str, Any], of_users: Told) -> bool:
    """Whether a product sums over the dimension of the batch: the last of the first factor, the one but last of the
    second one."""
    named = [kwargs[name] for name in ("input", "mat1", "batch1", "other", "mat2", "batch2", "vec") if name in kwargs]
    factors = [t for t in [*args, *named] if isinstance(t, Tensor)][-2:]
    if len(factors) < 2:  # by a name that is not known here
        return _any_of_users([*args, *kwargs.values()], of_users)
    first, second = factors
    return (of_users(first) and first.ndim - 1 == batch_of(first)) or (
        of_users(second) and max(0, second.ndim - 2) == batch_of(second)
    )


def _moves_along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of_users: Told) -> bool:
    place, dims = _ALONG[func]
    source = args[0] if args else kwargs.get("input")
    if not isinstance(source, Tensor) or not of_users(source):
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
    if not any(isinstance(t, Tensor) and _meets_batch(t, given.get("dim")) for t in (target, source)):
        return False
    if not isinstance(index, Tensor) or not isinstance(source, Tensor):
        return True
    return not _stays(target, index, source, user_of_row)


def _stays(target: Tensor, index: Tensor, source: Tensor, user_of_row: Tensor | None) -> bool:
    """Whether rows are put where they were picked, or at the place of their user, and so stay whose they are."""
    how = getattr(source, "_phantom_picked", None)
    if getattr(target, "_phantom_picked", None) is not None:
        return False
    if how is None:
        return user_of_row is not None and torch.equal(user_of_row, index)
    if how.index is None:
        return False
    if user_of_row is not None and how.total == len(user_of_row) and torch.equal(user_of_row[how.index], index):
        return True
    rows = len(target)
    return (
        how.packed is None
        and rows > 0
        and how.total % rows == 0
        and torch.equal(how.index // (how.total // rows), index)
    )


def _keeps_batch(args: tuple[Any, ...], of_users: Told) -> bool:
    """Whether users' operands of an einsum have their batch where the result has it."""
    if not isinstance(args[0], str) or "->" not in args[0]:
        return False
    inputs, result = args[0].replace(" ", "").split("->")
    operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    return all(
        letters[batch_of(t) :][:1] in (result[:1], result[batch_of(t) :][:1])
        and not (letters.startswith("...") and t.ndim <= len(letters) - 3)  # dots that stand for nothing
        for letters, t in zip(inputs.split(","), operands, strict=False)
        if of_users(t)
    )


def _meets_batch(source: Tensor, dims: Any) -> bool:
    """Whether the dimension of the batch may be among these; None are all."""
    some = dims if isinstance(dims, (tuple, list)) else (dims,)
    if len(some) == 1 and isinstance(some[0], (tuple, list)):
        (some,) = some
    away = [isinstance(d, int) and d % max(1, source.ndim) != batch_of(source) for d in some]
    return not away or not all(away)


def _any_of_users(values: Iterable[Any], of_users: Told) -> bool:
    return any(isinstance(t, Tensor) and of_users(t) for t in values)
