"""What the interception knows about functions: those of torch that only look, that write, that carry Python's numbers
in; and those of our own that see the tensors of all users at once."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dpformer import compat
from dpformer.clipping.trees import tensors_of


def named(names: str, *homes: Any) -> set[Any]:
    return {getattr(home, name) for home in homes for name in names.split() if hasattr(home, name)}


# A look at a parameter that takes no value from it, or takes it out of the graph on purpose.
READS = named(
    "detach size dim ndimension numel nelement stride is_contiguous element_size data_ptr is_floating_point is_complex "
    "is_signed get_device storage_offset untyped_storage is_pinned is_shared is_inference is_same_size __len__",
    Tensor,
) | named("is_floating_point is_complex numel is_tensor", torch)
# What takes numbers out of a tensor, to Python.
TELLS = named(
    "item tolist numpy is_nonzero equal allclose __array__ __bool__ __int__ __float__ __complex__ __index__ "
    "__contains__",
    Tensor,
    torch,
)
# Of these, and of attributes, what depends on no number in any tensor.
SIZES = named("size dim ndimension numel nelement stride is_contiguous __len__", Tensor) | {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")
}
BATCH_NORMS = named(
    "batch_norm _batch_norm_impl_index native_batch_norm _native_batch_norm_legit _batch_norm_with_update "
    "batch_norm_update_stats",
    torch,
) | {F.batch_norm}

COMPILED = (
    "torch.compile hides from the engine where parameters are used: give PhantomClipping the model itself and run it "
    "without torch.compile (what is compiled and not trained, such as a teacher, can run before `clipping.users`)"
)
TRANSPOSES = named("t transpose permute swapaxes swapdims movedim moveaxis adjoint", torch, Tensor) | {
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")
}
# They may carry data of users out of Python lists and arrays.
FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray, torch.frombuffer, torch.from_dlpack}
FROM_PYTHON |= named("from_file", torch)
LEND = {Tensor.new_tensor}
SPARSE = named(
    "sparse_coo_tensor sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor "
    "sparse_bsc_tensor",
    torch,
)
OF_WRAPPERS = {getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")}
HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad}
BACKWARD = {torch.autograd.backward, Tensor.backward}
REQUIRES_GRAD = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
OF_TORCH = {"aten", "prim", "prims", "quantized", "quantized_decomposed", "torchvision"}
TRUSTED = {"torch", "dpformer"}


def foreign(modes: Iterable[Any]) -> str:
    """The name of a mode that is neither torch's nor ours; "" if there is none."""
    others = (type(mode) for mode in modes if type(mode).__module__.split(".")[0] not in TRUSTED)
    return next((kind.__qualname__ for kind in others), "")


_opened: dict[Any, Callable[..., Any] | None] = {}


def without_overrides(func: Any) -> Callable[..., Any] | None:
    """A Python function of torch as it runs where nothing is overridden, so that its parts are seen one by one; None
    for a function that is compiled."""
    if func not in _opened:
        _opened[func] = _without_overrides(func)
    return _opened[func]


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _without_overrides(func: Any) -> Callable[..., Any] | None:
    if not isinstance(func, types.FunctionType) or not set(_CHECKS) & set(func.__code__.co_names):
        return None
    if getattr(func, "__module__", "").split(".")[0] != "torch":
        return None
    never = {name: lambda *_: False for name in _CHECKS}
    new = types.FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    new.__kwdefaults__ = func.__kwdefaults__
    return new


_LOOKS = {"requires_grad", "grad_fn", "is_leaf"}


def looks_whether_differentiable(func: Any) -> bool:
    """A Python function of torch that asks its arguments, and would be told those of a wrapper."""
    return (
        isinstance(func, types.FunctionType)
        and not _LOOKS.isdisjoint(func.__code__.co_names)
        and func not in HOOKS
        and func.__module__ != "torch._tensor"
    )


@cache
def overrides_functions(kind: type) -> bool:
    """A class of others (of tensors, or of what stands for one) with code of its own for functions of torch."""
    own = getattr(kind, "__torch_function__", None)
    of_tensors = (compat.NO_FUNCTION, Tensor.__torch_function__.__func__)  # type: ignore[attr-defined]
    return own is not None and getattr(own, "__func__", own) not in of_tensors and _is_of_others(kind)


@cache
def overrides_operators(kind: type) -> bool:
    """A class of tensors of others with code of its own for operators, where those of all users come together."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own not in (None, Tensor.__torch_dispatch__, compat.NO_DISPATCH) and _is_of_others(kind)


def _is_of_others(kind: type) -> bool:
    return kind.__module__.split(".")[0] not in TRUSTED


def is_transpose(out: Tensor, of: Tensor) -> bool:
    return of.ndim == 2 and out.shape == of.shape[::-1] and out.stride() == of.stride()[::-1]


def writes_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def uses_batch_statistics(args: Any, kwargs: Any) -> bool:
    """F.batch_norm(input, running_mean, running_var, weight, bias, training, …); only eval mode is per user."""
    training = kwargs.get("training", args[5] if len(args) > 5 else True)
    return bool(training)


# -- our own, which see the tensors of all users, (B, …) ---------------------------------------------------------------
#
# Compiled code cannot read one user's tensors, which torch batches. A function that computes each row of its arguments
# by itself can be given those of all users instead. That it does so is its own promise, which its tests must hold.

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
