"""What modules keep in Python: numbers, texts and the sizes of containers in their attributes.

Tensors carry the mark of their user, numbers do not. Where one user is computed after the other, a number that one of
them has left in an attribute would reach the next.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dpformer.clipping.errors import UnsupportedUse

_OF_TORCH = frozenset(vars(nn.Module()))
_PUBLIC = object()
State = dict[tuple[int, str], Any]


class PythonState:
    """The attributes of a model's modules, to be compared with later."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.named_modules())
        self.before = self._look()

    def compare(self) -> None:
        """Raises if an attribute has changed."""
        for (place, name), value in self._look().items():
            before = self.before.get((place, name), None)
            if value is _PUBLIC:  # a mask or a table made when it was first needed
                continue
            if type(before) is not type(value) or before != value:
                where = self.modules[place][0]
                raise UnsupportedUse(
                    f"attribute '{where + '.' if where else ''}{name}' was changed while one user was computed, so the "
                    f"next user would meet it: keep nothing of users in the model"
                )

    def _look(self) -> State:
        return {
            (place, name): _kept(value)
            for place, (_, module) in enumerate(self.modules)
            for name, value in vars(module).items()
            if name not in _OF_TORCH
        }


def _kept(value: Any) -> Any:
    """What can be compared of a value."""
    if isinstance(value, Tensor) and getattr(value, "_phantom_public", False) is not False:
        return _PUBLIC
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (list, tuple, set, dict)):
        parts = list(value.items()) if isinstance(value, dict) else list(value)
        return id(value), len(parts), [_shallow(part) for part in parts]
    return id(value)


def _shallow(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_shallow, value))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return id(value)
