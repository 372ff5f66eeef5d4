"""Calls on rows of users in order, perhaps beside frozen parameters: most calls of a forward pass, so they are quick.

Compiled code (_objects.c) says the same as the functions here, in a tenth of the time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpformer.clipping import picked
from dpformer.clipping.trees import tensors_of
from dpformer.clipping.turned import is_turned
from dpformer.kernels import native


def tensors_of_users(
    args: tuple[Any, ...], kwargs: dict[str, Any], own: set[int], constants: dict[int, Any]
) -> list[Tensor] | None:
    """The tensors that a function was given; None if not all of them are users' rows in order or frozen parameters.

    Args:
        own: identities of the model's parameters and buffers.
        constants: those of other tensors that are the same for every user.
    """
    tensors = tensors_of(*args, *kwargs.values())
    of_users = False
    for t in tensors:
        if id(t) in own:
            if t.requires_grad:
                return None
        elif type(t) is not Tensor or id(t) in constants or _is_marked(t):
            return None
        else:
            of_users = True
    return tensors if of_users else None


def _is_marked(t: Tensor) -> bool:
    """Whether there is more to be said of a tensor than that its rows are users' in order."""
    return getattr(t, "_phantom_public", False) or is_turned(t) or picked.picked(t) is not None


def marked_computed(out: Any, given: list[Tensor]) -> Any:
    """What was computed inside the context is marked; a tensor that was given back as it came is not."""
    for t in tensors_of(out):
        if not any(t is one for one in given):
            picked.mark_computed(t)
    return out


in_python = tensors_of_users, marked_computed
if native.objects is not None:
    tensors_of_users, marked_computed = native.objects.of_users, native.objects.mark_computed
