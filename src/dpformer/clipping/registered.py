"""Parameters and buffers of a model by name, looked at before and after every pass: the walk is remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import Tensor, nn


@dataclass
class Registered:
    """Each tensor once, by the first of its names, as `named_parameters` and `named_buffers` give them."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def all(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}


class Walk:
    """What a model holds, walked over again only if something in it was added, removed or replaced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._seen: list[Seen] = []
        self._found: Registered | None = None

    def __call__(self) -> Registered:
        """The same object as before, if nothing has changed."""
        if self._found is None or not all(map(_is_same, self._seen)):
            modules: list[nn.Module] = []
            self._found = registered(self.model, modules)
            self._seen = [_seen(module, kind) for module in modules for kind in ("_parameters", "_buffers", "_modules")]
        return self._found


Seen = tuple[nn.Module, str, Any, list[str], list[Any]]  # a dictionary of a module, with what was in it


def _seen(module: nn.Module, kind: str) -> Seen:
    home = getattr(module, kind)
    return module, kind, home, list(home.keys()), list(home.values())


def _is_same(seen: Seen) -> bool:
    module, kind, home, names, values = seen
    if getattr(module, kind) is not home or len(home) != len(values):
        return False
    return not values or (all(map(is_, home.values(), values)) and list(home.keys()) == names)


def registered(model: nn.Module, walked: list[nn.Module] | None = None) -> Registered:
    """What the model holds now; the modules are put into a list, if one is given."""
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
        if walked is not None:
            walked.append(module)
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
