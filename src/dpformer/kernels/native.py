"""Compiled passes over memory (_native.c, with one header per subject).

They are None where there was no compiler when dpformer was installed. Each function has a reference in torch or NumPy,
for other devices, other dtypes and installations without a compiler; `supports` decides between the two.
"""

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

kernels: ModuleType | None
try:
    from dpformer.kernels import _native as kernels
except ImportError:
    kernels = None

# Newer versions of torch let compiled code read tensors where they are, through the C interface of DLPack.
_offered = kernels is not None and bool(
    kernels.multiplies
    and hasattr(Tensor, "__dlpack_c_exchange_api__")
    and kernels.exchange(Tensor.__dlpack_c_exchange_api__)
)

__all__ = ["kernels", "multiplies", "reads_tensors", "rows_of", "supports"]


def supports(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether compiled code is available and takes these tensors: on the CPU, of the dtype that a function reads."""
    return kernels is not None and all(t.is_cpu and t.dtype == dtype for t in tensors)


def multiplies() -> bool:
    """Whether compiled code multiplies rows, with the same bits whatever other rows there are."""
    return kernels is not None and bool(kernels.multiplies)


def reads_tensors() -> bool:
    """Whether compiled code reads tensors directly."""
    return kernels is not None and _offered


def rows_of(t: Tensor) -> np.ndarray:
    """A tensor of the CPU as an array with contiguous rows along the last dimension; a copy only if needed."""
    t = t.resolve_neg() if t.is_neg() else t
    return (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()).numpy()
