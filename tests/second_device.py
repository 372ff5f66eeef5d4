"""A second device for machines that have one only: its tensors live on the CPU and do not mix with those that do.

A tensor `There` says that it is on device "second" and holds a tensor `here` that is computed with. A function of
tensors on both devices is refused, as CUDA refuses it, so whatever code forgets to move is found. Torch can have one
such device a process and never lose it: use it in a process of its own (`tests.distributed.jobs`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME, PLACE = "second", "second:0"
POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")  # torch 2.9 or so
MOVES = ("_to_copy", "copy_")
INDEXES = ("index", "index_put_")  # CUDA takes indices from the CPU


class There(Tensor):
    """A tensor on the second device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made: There = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype, device=PLACE
        )
        made.here = here
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:  # torch has none for subclasses
        return self.here.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor of the second device is not numpy's: use .cpu() first")


class SecondDevice(TorchDispatchMode):
    """While it is on, "second" is a device: factories and `.to` know it."""

    def __init__(self) -> None:
        super().__init__()
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class _Module(backend_registration._DummyBackendModule if POSSIBLE else object):  # type: ignore[misc]
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function of torch on both devices: computed on the CPU, its results put where they belong."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = any(isinstance(t, There) for t in tensors)
    both = there and any(t.ndim and not isinstance(t, There) for t in tensors)  # numbers go anywhere
    if both and func.overloadpacket.__name__ not in (*MOVES, *INDEXES):
        raise RuntimeError(f"{func} got tensors of two devices")
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == NAME
        kwargs = {**kwargs, "device": "cpu"}
    found = func(*tree_map(_here, args), **tree_map(_here, kwargs))
    if func._schema.is_mutable:
        return _written(func._schema, args, kwargs)
    return tree_map(lambda t: There(t) if there and isinstance(t, Tensor) else t, found)


def _here(value: Any) -> Any:
    return value.here if isinstance(value, There) else value


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function that writes in place returns: the very tensors it was given."""
    if not schema.returns:
        return None
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    into = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return into[0] if len(schema.returns) == 1 else tuple(into)
