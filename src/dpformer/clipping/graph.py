"""The graph of autograd."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def leaves(t: Tensor) -> list[Tensor]:
    """The parameters that an expression is made of."""
    if t.grad_fn is None:
        return [t]
    seen: set[Any] = set()
    found: dict[int, Tensor] = {}
    stack = [t.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        stack.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    return list(found.values())
