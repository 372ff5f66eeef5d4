"""All private functions and modules of torch that the project uses; everything else imports them from here.

tests/test_compat.py holds them to the torch that is installed, and no other file may name one. Those of torch 2.6 and
2.13 are the same. (Private attributes of tensors, modules and nodes of the graph, such as `t._version`, are used where
they are needed.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, _tensor
from torch._C import DisableTorchFunction as unseen  # inside, torch functions are not intercepted
from torch._C import ScriptFunction, ScriptMethod
from torch._C import TensorBase as _TensorBase
from torch._C import _disabled_torch_dispatch_impl as NO_DISPATCH
from torch._C import _disabled_torch_function_impl as NO_FUNCTION
from torch._C import _is_torch_function_enabled as classes_are_asked  # for code that they have for functions
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import (
    _add_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    maybe_get_bdim,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._C._functorch import get_unwrapped as get_unwrapped
from torch._C._functorch import is_batchedtensor as is_batchedtensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._C._functorch import maybe_current_level as maybe_current_level
from torch._C._functorch import peek_interpreter_stack as transforms
from torch._functorch import eager_transforms, vmap
from torch._functorch.vmap import lazy_load_decompositions
from torch._ops import OpOverload, OpOverloadPacket
from torch._utils import _flatten_dense_tensors as flattened
from torch.autograd import forward_ad
from torch.autograd import function as _function
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as _modules
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes_below
from torch.utils._pytree import tree_leaves

__all__ = [
    "APPLIES",
    "CHECKPOINTS",
    "GRAD",
    "NO_DISPATCH",
    "NO_FUNCTION",
    "WRAPPERS",
    "BackwardCFunction",
    "OpOverload",
    "OpOverloadPacket",
    "Outside",
    "ScriptFunction",
    "ScriptMethod",
    "TorchDispatchMode",
    "VmapLevel",
    "classes_are_asked",
    "copy_all",
    "dispatch_modes",
    "divide_all",
    "flattened",
    "function_modes",
    "get_eval_frame_callback",
    "get_unwrapped",
    "has_global_backward_hooks",
    "is_batchedtensor",
    "is_differentiating_forward",
    "is_functorch_wrapped_tensor",
    "maybe_current_level",
    "modes_below",
    "namespace",
    "norms_of_all",
    "physical",
    "transforms",
    "tree_leaves",
    "unsafe_view",
    "unseen",
    "zero_all",
]

# The functions by which transforms of torch.func and classes wrap and unwrap a tensor, their first argument.
WRAPPERS = [
    (_tensor, "_convert"),
    (vmap, "_add_batch_dim"),
    (vmap, "_remove_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_unwrap_for_grad"),
]
# What torch.utils.checkpoint.checkpoint calls: with use_reentrant=True, and with False.
CHECKPOINTS = [(checkpoint.CheckpointFunction, "apply"), (checkpoint, "_checkpoint_without_reentrant_generator")]
# What torch.autograd.Function.apply calls, also where a model has taken it before: in a transform, and outside.
APPLIES = [(_function, "custom_function_call"), (_function._SingleLevelFunction, "apply")]
GRAD = vars(_TensorBase)["grad"].__get__  # as `t.grad` is called
unsafe_view = torch.ops.aten._unsafe_view.default  # a view that autograd takes for a tensor of its own

divide_all, copy_all, zero_all = torch._foreach_div_, torch._foreach_copy_, torch._foreach_zero_
norms_of_all = torch._foreach_norm


def namespace(operator: OpOverload | OpOverloadPacket) -> str:
    """aten, or that of a library."""
    return str(operator._qualified_op_name if isinstance(operator, OpOverloadPacket) else operator._name).split("::")[0]


def has_global_backward_hooks() -> bool:
    """Whether hooks were put on the backward passes of all modules."""
    return bool(_modules._global_backward_hooks or _modules._global_backward_pre_hooks)


def is_differentiating_forward() -> bool:
    """Whether forward-mode differentiation is under way."""
    return bool(forward_ad._current_level >= 0)


# -- a level of vmap, entered without a function: torch.func.vmap takes one, and a `with` block is none ----------------


class VmapLevel:
    """A level of torch's vmap for `users` users; random numbers differ between users, as they do in a batch."""

    def __init__(self, users: int) -> None:
        lazy_load_decompositions()
        self.users = users
        self.number = _vmap_increment_nesting(users, "different")

    def leave(self) -> None:
        _vmap_decrement_nesting()

    def is_current(self) -> bool:
        """False inside another transform (torch.func.vmap, grad) that the model has entered."""
        return bool(maybe_current_level() == self.number)

    def wrap(self, t: Tensor) -> Tensor:
        """(B, …) → what one user's is, (…)."""
        wrapped: Tensor = _add_batch_dim(t, 0, self.number)
        return wrapped


class Outside:
    """Outside the level for a moment (and any other inside it), where tensors have the users' dimension, (B, …)."""

    def __enter__(self) -> None:
        self._saved: list[Any] = []
        while maybe_current_level() is not None:
            self._saved.append(pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self._saved:
            push_dynamic_layer_stack(self._saved.pop())


def physical(t: Tensor) -> Tensor:
    """One user's tensor (…) → that of all users, (B, …)."""
    inner: Tensor = get_unwrapped(t)
    dim = maybe_get_bdim(t)
    return inner.movedim(dim, 0) if dim else inner
