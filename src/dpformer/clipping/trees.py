"""Tensors in the arguments and results of functions, and in users' data: nested tuples, lists, dicts, dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

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
