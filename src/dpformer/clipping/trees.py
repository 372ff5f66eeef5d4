"""Tensors in the arguments and results of functions, and in users' data: nested tuples, lists, dicts, dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor


def tensors_of(*trees: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts. Every torch call passes here: plain loops, no generators."""
    found: list[Tensor] = []
    for tree in trees:
        if tree is None:
            continue
        if isinstance(tree, Tensor):
            found.append(tree)
        elif isinstance(tree, (tuple, list)):
            if tree:
                found += tensors_of(*tree)
        elif isinstance(tree, dict) and tree:
            found += tensors_of(*tree.values())
    return found


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same tree with every tensor changed."""
    return map_trees(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def map_trees(change: Callable[..., Any], *trees: Any) -> Any:
    """change(leaf of the first tree, leaf of the second, …) in the form of the first; the others must have that form.

    Raises:
        ValueError: if they have not.
    """
    first = trees[0]
    if isinstance(first, (tuple, list)):
        if any(type(tree) is not type(first) or len(tree) != len(first) for tree in trees):
            raise ValueError("the trees have different forms")
        values = [map_trees(change, *each) for each in zip(*trees, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    if isinstance(first, Mapping):
        if any(not isinstance(tree, Mapping) or list(tree) != list(first) for tree in trees):
            raise ValueError("the trees have different forms")
        named = {name: map_trees(change, *(tree[name] for tree in trees)) for name in first}
        if type(first) is dict:
            return named
        kind: Any = type(first)
        try:
            return kind(**named)  # results of transformers, batches of a tokenizer
        except TypeError:
            return kind(named)
    if is_dataclass(first) and not isinstance(first, type):
        if any(type(tree) is not type(first) for tree in trees):
            raise ValueError("the trees have different forms")
        names = [f.name for f in fields(first) if f.init]
        return replace(first, **{n: map_trees(change, *(getattr(tree, n) for tree in trees)) for n in names})
    return change(*trees)


# -- users' data -------------------------------------------------------------------------------------------------------


def tree_of(data: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Users' data as a tree of tensors, and what makes one user's data of that user's tree.

    An object that keeps them otherwise (dpformer.integrations.batches.Part) has methods for both.
    """
    if hasattr(data, "by_user"):
        return data.by_user(), data.of_user
    return data, lambda mine: mine


def count_of(data: Any) -> int:
    """How many users the data are of.

    Raises:
        ValueError: if there are none.
    """
    if not (count := rows_of(data)):
        raise ValueError("there are no users: skip this part, an empty batch needs no forward pass")
    return count


def rows_of(data: Any) -> int:
    """The rows of all tensors.

    Raises:
        ValueError: if they disagree.
    """
    counts: list[int] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            raise ValueError(f"users' data have an array of shape {leaf.shape}: give tensors (torch.from_numpy)")
        if isinstance(leaf, Tensor):
            if leaf.ndim == 0:
                raise ValueError("users' data have a tensor without dimensions: the first one must count the users")
            counts.append(len(leaf))
        return leaf

    tree = tree_of(data)[0]
    map_trees(look, tree)
    if not counts:
        raise ValueError(
            f"users' data hold no tensor, got {type(data).__name__}: give tensors with a row for each user"
        )
    if len(set(counts)) > 1:
        raise ValueError(f"users' data have tensors of {sorted(set(counts))} rows: each needs one row for each user")
    _refuse_lists(tree, counts[0])
    return counts[0]


def _refuse_lists(tree: Any, users: int) -> None:
    """A list of as many numbers or words as users seems to have one for each, but every user would get all of them."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            _refuse_lists(value, users)
    elif isinstance(tree, (tuple, list)):
        if isinstance(tree, list) and len(tree) == users and all(isinstance(v, (int, float, str)) for v in tree):
            raise ValueError(
                f"users' data have a list of {users} Python values, as many as users, of which every user would get "
                "all: give a tensor with a row for each user, or leave out what the model does not need"
            )
        for value in tree:
            _refuse_lists(value, users)


def versions_of(data: Any) -> list[int]:
    """Counts of writes to the tensors of users' data."""
    return [-1 if t.is_inference() else t._version for t in tensors_of(tree_of(data)[0])]
