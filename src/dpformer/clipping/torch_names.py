"""All private names of torch that the clipping engine needs, in one place: tests/clipping/test_torch_names.py holds
them to the torch that is installed. `torch.func.vmap` itself takes a function, and a `with` block is none."""

from torch._C import ScriptFunction, ScriptMethod
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import (
    _add_batch_dim as add_batch_dim,
)
from torch._C._functorch import (
    _vmap_decrement_nesting as leave_level,
)
from torch._C._functorch import (
    _vmap_increment_nesting as enter_level,
)
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_bdim,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch import eager_transforms, vmap
from torch._functorch.vmap import lazy_load_decompositions
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes_below


def namespace(operator: OpOverload | OpOverloadPacket) -> str:
    """aten, or that of a library."""
    return str(operator._qualified_op_name if isinstance(operator, OpOverloadPacket) else operator._name).split("::")[0]


# The functions by which transforms inside the model wrap and unwrap a tensor, their first argument.
WRAPPERS = [
    (vmap, "_add_batch_dim"),
    (vmap, "_remove_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_unwrap_for_grad"),
]

__all__ = [
    "WRAPPERS",
    "OpOverload",
    "OpOverloadPacket",
    "ScriptFunction",
    "ScriptMethod",
    "add_batch_dim",
    "dispatch_modes",
    "enter_level",
    "function_modes",
    "get_eval_frame_callback",
    "get_unwrapped",
    "is_batchedtensor",
    "is_functorch_wrapped_tensor",
    "lazy_load_decompositions",
    "leave_level",
    "maybe_current_level",
    "maybe_get_bdim",
    "modes_below",
    "namespace",
    "pop_dynamic_layer_stack",
    "push_dynamic_layer_stack",
]
