"""Compiled passes over memory (_native.c), where a compiler was at hand when dpformer was installed; else None.

Whoever calls one has a twin in Python, for other devices, other dtypes and installations without it.
"""

from types import ModuleType

kernels: ModuleType | None
try:
    from dpformer import _native as kernels
except ImportError:
    kernels = None

__all__ = ["kernels"]
