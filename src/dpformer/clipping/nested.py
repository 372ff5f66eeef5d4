"""torch.func inside the model: another vmap or grad wraps tensors anew, out of sight; whose they are goes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from dpformer.clipping import torch_names
from dpformer.clipping.interception import Interception
from dpformer.clipping.recorder import version_of


@contextmanager
def marks_are_kept(gate: Interception) -> Iterator[None]:
    """Inside, transforms of torch.func keep the marks of the tensors that they wrap and unwrap."""
    with ExitStack() as stack:
        for module, name in torch_names.WRAPPERS:
            stack.enter_context(patch.object(module, name, _keeping(gate, getattr(module, name))))
        yield


def _keeping(gate: Interception, function: Callable[..., Any]) -> Callable[..., Any]:
    def keeping(*args: Any) -> Any:
        given, out = args[0], function(*args)
        if isinstance(given, Tensor) and isinstance(out, Tensor) and out is not given:
            if mark := getattr(given, "_phantom_user", 0):
                out._phantom_user = mark  # type: ignore[attr-defined]
            elif gate.is_public(given):
                out._phantom_public = version_of(out)  # type: ignore[attr-defined]
        return out

    return keeping
