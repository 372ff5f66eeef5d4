"""What a model holds, and whether a forward pass has changed it.

A forward pass that changes them carries one user's data into the next user's loss, and into the released model, past
clipping and noise: a running mean, a queue of past users, a renormalised table. What it keeps in other places (a global
variable) is not seen here; `dp.check` finds it by what it does to the losses.
"""

from __future__ import annotations

import functools
import random
import types
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.compat import is_functorch_wrapped_tensor, unseen
from dpformer.errors import UnsupportedUse
from dpformer.kernels.checksum import Bits, bits_of_all, equal

# -- parameters and buffers by name: the walk is remembered ------------------------------------------------------------


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


# -- their contents ----------------------------------------------------------------------------------------------------


LARGE = 1 << 26  # numbers; the contents of a larger model are compared only now and then
EVERY = 32


Mark = tuple[int, int, Bits | None]  # of a tensor: its memory, the count of its changes, the sum of its bits


class State:
    """The parameters and buffers found in a model, to be compared with later."""

    def __init__(self, found: Registered) -> None:
        self.found, self.tensors = found, found.all()
        size = sum(t.numel() for t in self.tensors.values())
        self.contents = size <= LARGE or random.SystemRandom().randrange(EVERY) == 0
        self.marks = self._marks(self.tensors.values())

    def _marks(self, tensors: Collection[Tensor]) -> list[Mark]:
        plain = [_is_plain(t) for t in tensors]
        bits = iter(bits_of_all(list(compress(tensors, plain))) if self.contents else [])
        return [
            (
                t.data_ptr() if is_plain else 0,
                0 if t.is_inference() else t._version,
                next(bits, None) if is_plain else None,
            )
            for t, is_plain in zip(tensors, plain, strict=True)
        ]

    def compare(self, found: Registered, is_public: Callable[[Tensor], bool]) -> None:
        """Raises if the forward pass has changed the model; a buffer may be made anew of public numbers."""
        now = found.all()
        before = dict(zip(self.tensors, self.marks, strict=True))
        kept = {name: t for name, t in now.items() if self.tensors.get(name) is t}
        unchanged = dict(zip(kept, _same([before[name] for name in kept], self._marks(kept.values())), strict=True))
        if found is self.found and all(unchanged.values()):
            return
        for name, tensor in now.items():
            replaced = name not in kept
            if is_public(tensor) if replaced else unchanged[name]:
                continue
            change = "was written to" if not replaced else "was replaced" if name in before else "was made"
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise UnsupportedUse(
                f"{kind} '{name}' {change} in the forward "
                f"pass: what it keeps of users would reach other users' losses and the released model, outside the "
                f"guarantee; keep no running statistics, queues or counts in the model"
            )
        if gone := sorted(set(self.tensors) - set(now)):
            raise UnsupportedUse(f"'{gone[0]}' was taken out of the model in the forward pass; leave it in")


def _same(before: Sequence[Mark], now: Sequence[Mark]) -> list[bool]:
    bits = [(a[2], b[2]) for a, b in zip(before, now, strict=True)]
    known = [a is not None and b is not None for a, b in bits]
    told = iter(
        equal(
            [a for a, _ in compress(bits, known) if a is not None],
            [b for _, b in compress(bits, known) if b is not None],
        )
    )
    return [
        a[:2] == b[:2] and (next(told) if is_known else a[2] is b[2])
        for a, b, is_known in zip(before, now, known, strict=True)
    ]


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not is_functorch_wrapped_tensor(t)


# -- what the attributes of modules hold ------------------------------------------------------------------------------


MOST = 50_000  # objects that are looked at
_BYTES = 1 << 20  # of an array
_LEFT_OUT = frozenset(("_parameters", "_modules", "_buffers"))  # `State` looks after parameters
_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_OF_LIBRARIES = frozenset(("torch", "logging", "threading", "weakref"))
_NOTHING = object()
Place = tuple[int, str, str]  # of an attribute or a buffer: the module, where in it, and its name


class PythonState:
    """What the attributes of a model's modules hold, to be compared with later.

    Containers, arrays, objects and the variables of functions are looked into; not generators, iterators and classes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.named_modules())
        self.before = self._look()

    def compare(self, is_public: Callable[[Tensor], bool]) -> None:
        """Raises if something has changed. A mask or a table that was made when it was first needed is taken away
        again, so that the next user makes its own."""

        def counts(before: Any, value: Tensor) -> bool:
            """Whether it may be the next number of a count."""
            is_of_same_form = isinstance(before, Tensor) and is_public(before) and before.shape == value.shape
            with unseen():
                return is_of_same_form and not torch.equal(before, value)

        now = self._look()
        for place in self.before.keys() | now.keys():
            (before, look), (value, look_now) = (s.get(place, (_NOTHING, None)) for s in (self.before, now))
            if look == look_now and (before is _NOTHING) == (value is _NOTHING):
                continue
            number, home, name = place
            if isinstance(value, Tensor) and is_public(value) and value is not before and not counts(before, value):
                of_module = vars(self.modules[number][1])
                values = of_module[home] if home else of_module
                if before is _NOTHING:
                    del values[name]
                else:
                    values[name] = before
                continue
            where = self.modules[number][0]
            raise UnsupportedUse(
                f"attribute '{where + '.' if where else ''}{name}' was changed while one user was computed, so the "
                f"next user would meet it: keep nothing of users in the model"
            )

    def _look(self) -> dict[Place, tuple[Any, Any]]:
        look = _Look({id(module) for _, module in self.modules})
        found: dict[Place, tuple[Any, Any]] = {}
        for number, (_, module) in enumerate(self.modules):
            for home, values in (("", vars(module)), ("_buffers", module._buffers)):
                named = {name: value for name, value in values.items() if name not in _LEFT_OUT}
                found.update({(number, home, name): (value, look.at(value)) for name, value in named.items()})
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    kept = {key: each for key, each in vars(parameter).items() if not key.startswith("_phantom")}
                    found[number, "_parameters", name] = parameter, look.all(kept)
        return found


class _Look:
    """What can be compared of objects, each looked into once."""

    def __init__(self, modules: set[int]) -> None:
        self.seen = modules
        self.left = MOST

    def at(self, value: Any) -> Any:
        if isinstance(value, _NUMBERS):
            return repr(value)
        if isinstance(value, Tensor):
            return id(value), 0 if value.is_inference() else value._version
        if isinstance(value, np.ndarray) and value.nbytes <= _BYTES and value.dtype != object:
            return id(value), value.tobytes()
        if isinstance(value, types.MethodType):  # made anew whenever it is asked for
            return id(value.__func__), self.at(value.__self__)
        if id(value) in self.seen or not self.left or isinstance(value, (type, types.ModuleType)):
            return id(value)
        self.seen.add(id(value))
        self.left -= 1
        return id(value), self._inside(value)

    def all(self, named: dict[str, Any]) -> list[Any]:
        return [(name, self.at(value)) for name, value in named.items()]

    def _inside(self, value: Any) -> Any:
        if isinstance(value, dict):
            return [(self.at(key), self.at(each)) for key, each in value.items()]
        if isinstance(value, _CONTAINERS):
            return list(map(self.at, value))
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            return [*map(self.at, [*cells, value.__defaults__, value.__kwdefaults__]), self.all(vars(value))]
        if isinstance(value, functools.partial):
            return list(map(self.at, (value.func, value.args, value.keywords)))
        kind = type(value)
        if kind.__module__.split(".")[0] in _OF_LIBRARIES and not isinstance(value, nn.Module):
            return None
        slots = [name for each in kind.__mro__ for name in _names(vars(each).get("__slots__", ()))]
        kept = {name: getattr(value, name, None) for name in slots if not name.startswith("__")}
        return [*self.all(kept), *self.all(getattr(value, "__dict__", {})), self._of_library(value)]

    def _of_library(self, value: Any) -> Any:
        """Of classes that are not written in Python: arrays, generators of random numbers."""
        if not isinstance(value, (array, bytearray, random.Random, np.random.Generator)):
            return None
        state = value.bit_generator.state if isinstance(value, np.random.Generator) else value.__reduce_ex__(2)
        return repr(state)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
