"""Parameters and buffers of a model by name, in one quick walk: they are looked at before and after every pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass
class Registered:
    """Each tensor once, by the first of its names, as `named_parameters` and `named_buffers` give them."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def all(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}


def registered(model: nn.Module) -> Registered:
    """What the model holds now."""
    found = Registered()
    modules: set[int] = set()
    parameters: set[int] = set()
    buffers: set[int] = set()  # one tensor may be both
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in modules:
            continue
        modules.add(id(module))
        if module._parameters:
            _add(found.parameters, parameters, prefix, module._parameters)
        if module._buffers:
            _add(found.buffers, buffers, prefix, module._buffers)
        if module._modules:
            children = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
            waiting += reversed(children)
    return found


def _add(home: dict[str, Tensor], seen: set[int], prefix: str, named: Mapping[str, Tensor | None]) -> None:
    for name, tensor in named.items():
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            home[prefix + name] = tensor
