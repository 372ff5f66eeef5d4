"""Tensors in the arguments and results of functions: nested tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable
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
    """The same nested tuples, lists and dicts with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(change, value) for value in tree)
    if isinstance(tree, dict):
        return {name: map_tensors(change, value) for name, value in tree.items()}
    return tree
