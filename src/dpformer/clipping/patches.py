"""What torch and transformers do otherwise while a context is open, in the thread that has opened it.

A function is replaced for the whole process while any thread needs it; what stands in its place looks whether this
thread does, and else calls what was there. So threads may open and close contexts in any order.

Activation checkpointing is passed over: a checkpointed layer would run again in the backward pass, where no context is
open that records the uses of its parameters. The recorded calls keep the inputs of all layers anyway: the gradients are
the same, and no memory is saved by it. Smaller micro-batches save memory instead.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from dpformer import compat
from dpformer.clipping.interception import Interception
from dpformer.clipping.recording import version_of

Handler = Callable[..., Any]  # (what was there, *arguments) → result
Replacement = tuple[Any, str, Handler]  # of an attribute of an object
_lock = threading.Lock()
_installed: dict[tuple[int, str], _Installed] = {}


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.handlers: defaultdict[tuple[int, str], list[Handler]] = defaultdict(list)


_here = _OfThread()


class _Installed:
    """A function that was replaced, as long as some thread needs it."""

    def __init__(self, home: Any, name: str) -> None:
        self.home, self.name, self.needed = home, name, 0
        self.inherited = name not in vars(home)
        self.before = inspect.getattr_static(home, name)
        of_class = isinstance(self.before, (classmethod, types.ClassMethodDescriptorType))
        original = self.before.__func__ if isinstance(self.before, classmethod) else self.before
        key = (id(home), name)

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            handlers = _here.handlers[key]
            return handlers[-1](original, *args, **kwargs) if handlers else original(*args, **kwargs)

        setattr(home, name, classmethod(dispatch) if of_class else dispatch)

    def remove(self) -> None:
        if self.inherited:
            delattr(self.home, self.name)
        else:
            setattr(self.home, self.name, self.before)


@contextmanager
def replaced(replacements: list[Replacement]) -> Iterator[None]:
    """Inside, in this thread, the handlers are called instead."""
    handlers = _here.handlers
    with _lock:
        for home, name, handler in replacements:
            key = (id(home), name)
            if key not in _installed:
                _installed[key] = _Installed(home, name)
            _installed[key].needed += 1
            handlers[key].append(handler)
    try:
        yield
    finally:
        with _lock:
            for home, name, _ in reversed(replacements):
                key = (id(home), name)
                handlers[key].pop()
                _installed[key].needed -= 1
                if not _installed[key].needed:
                    _installed.pop(key).remove()


def of_contexts(gate: Interception) -> list[Replacement]:
    """Checkpointing runs its function and does nothing else, transforms of torch.func keep the marks of the tensors
    that they wrap and unwrap, and transformers does not look into padding."""
    (reentrant, apply), (module, generator) = compat.CHECKPOINTS
    return [
        (reentrant, apply, lambda _, cls, function, preserve, *args: function(*args)),
        (module, generator, _runs_once),
        *((module, name, _keeping(gate)) for module, name in compat.WRAPPERS),
        *_masks_of_transformers(),
    ]


def _runs_once(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of torch's generator around a checkpointed function."""
    yield


def _keeping(gate: Interception) -> Handler:
    """Another vmap or grad inside the model wraps tensors anew, out of sight; whose they are goes with them."""

    def keeping(function: Callable[..., Any], *args: Any) -> Any:
        given, out = args[0], function(*args)
        if isinstance(given, Tensor) and isinstance(out, Tensor) and out is not given:
            if mark := getattr(given, "_phantom_user", 0):
                out._phantom_user = mark  # type: ignore[attr-defined]
            elif gate.is_public(given):
                out._phantom_public = version_of(out)  # type: ignore[attr-defined]
        return out

    return keeping


def _masks_of_transformers() -> list[Replacement]:
    """transformers looks into padding to leave masks out, except while a model is traced; so it does inside."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "is_tracing"):
        return []

    def is_tracing(before: Callable[..., Any], tensor: Any = None) -> bool:
        return True if isinstance(tensor, Tensor) and compat.is_batchedtensor(tensor) else bool(before(tensor))

    return [(masks, "is_tracing", is_tracing)]
