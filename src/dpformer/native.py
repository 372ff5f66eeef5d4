"""Compiled passes over memory (_native.c) and over Python objects (_objects.c); None where there was no compiler when
dpformer was installed.

Whoever calls one has a twin in Python, for other devices, other dtypes and installations without it.
"""

from types import ModuleType

import numpy as np
from torch import Tensor

kernels: ModuleType | None
try:
    from dpformer import _native as kernels
except ImportError:
    kernels = None

objects: ModuleType | None
try:
    from dpformer import _objects as objects
except ImportError:
    objects = None

__all__ = ["kernels", "objects", "rows_of"]


def rows_of(t: Tensor) -> np.ndarray:
    """A tensor of the CPU as an array whose rows, along the last dimension, have no gaps; a copy only if needed."""
    t = t.resolve_neg() if t.is_neg() else t
    return (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()).numpy()
