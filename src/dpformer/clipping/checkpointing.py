"""Activation checkpointing inside the context: the layers run once, and nothing is computed again.

A checkpointed layer would run again in the backward pass, where no context is open that records the uses of its
parameters. The recorded calls keep the inputs of all layers anyway, so inside the context checkpointing is passed over:
the gradients are the same, and no memory is saved by it. Smaller micro-batches save memory instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint


class _RunOnce:
    """In the place of torch's CheckpointFunction (use_reentrant=True)."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _run_once(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of torch's generator that wraps the function (use_reentrant=False)."""
    yield


@contextmanager
def passed_over() -> Iterator[None]:
    """Inside, torch.utils.checkpoint.checkpoint calls its function and does nothing else."""
    names = {"CheckpointFunction": _RunOnce, "_checkpoint_without_reentrant_generator": _run_once}
    before = {name: getattr(checkpoint, name) for name in names}
    try:
        for name, value in names.items():
            setattr(checkpoint, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(checkpoint, name, value)
