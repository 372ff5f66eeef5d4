"""The optimizer inside a private one may step only within a private step.

Its own `step` would move the weights by whatever `p.grad` holds: users' gradients without noise, or noisy ones a second
time, and no event would count it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

_GUARD = "_private_steps_only"


class Guard:
    """A hook before each step of the inner optimizer, which allows the step only inside its context."""

    def __init__(self) -> None:
        self.inside = False

    def __call__(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        if not self.inside:
            raise RuntimeError(
                f"this {type(inner).__name__} is inside a PrivateOptimizer, so its own step would move the weights "
                "without noise and uncounted: call `step` of the private optimizer"
            )

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inside = False


def only_private(inner: torch.optim.Optimizer) -> Guard:
    """The guard of an optimizer, installed on first use."""
    guard: Guard | None = inner.__dict__.get(_GUARD)
    if guard is None:
        guard = Guard()
        try:
            inner.register_step_pre_hook(guard)
        except AttributeError:
            raise ValueError(
                f"the inner optimizer is a {type(inner).__name__}, which itself wraps another: give the plain torch "
                "optimizer, before anything wraps it"
            ) from None
        setattr(inner, _GUARD, guard)
    return guard
