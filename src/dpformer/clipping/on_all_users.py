"""Functions of our own that see the tensors of all users at once, (B, …), inside `clipping.users`.

Compiled code cannot read one user's tensors, which torch batches. A function that computes each row of its arguments by
itself can be given those of all users instead. That it does so is its own promise, which its tests must hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

from dpformer.clipping.trees import tensors_of

ON_ALL_USERS: set[Any] = set()

Function = TypeVar("Function", bound=Callable[..., Any])


def on_all_users(function: Function) -> Function:
    """Declares that `function` computes every row of its tensors alone, and without parameters that are trained.

    Its tensors have users first, (B, …), and so have its results, if they are tensors; what is the same for all users
    comes as it is.
    """

    @wraps(function)
    def overridable(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(tensors_of(*args, *kwargs.values()))
        if has_torch_function(tensors):
            return handle_torch_function(overridable, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    ON_ALL_USERS.add(overridable)
    return overridable  # type: ignore[return-value]
