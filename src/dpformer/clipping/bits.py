"""The sum of the bits of a tensor, read as whole numbers, modulo 2⁶⁴: whether its contents are what they were.

A guard against mistakes, not against forgery: nearly every change changes the sum. The model and its gradients are
looked at in every step, and most of their tensors are small, so small ones are read together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flattened

from dpformer import native

Bits = int | Tensor  # a tensor, () int64, where it was computed on another device
SMALL = 1 << 12  # numbers
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(t: Tensor) -> Bits:
    """Of one tensor."""
    return bits_of_all([t])[0]


def bits_of_all(tensors: Sequence[Tensor]) -> list[Bits]:
    """The sum of words of each; how long a word is depends on the tensor, and on what there is to read it."""
    return bits_and_finite(tensors)[0]


def bits_and_finite(tensors: Sequence[Tensor]) -> tuple[list[Bits], bool]:
    """The same, and whether all numbers are known to be finite by it: False where nobody has looked."""
    quick, finite = [place for place, t in enumerate(tensors) if is_quick(t)], False
    if native.kernels is None:
        sums = _sums([np.from_dlpack(tensors[place].detach()) for place in quick])  # numpy() would forbid to resize it
    else:
        places = [(tensors[place].data_ptr(), tensors[place].numel()) for place in quick]
        sums, finite = native.kernels.sums_of_words(places)
    found: dict[int, Bits] = dict(zip(quick, sums, strict=True))
    bits = [found[place] if place in found else _bits(t) for place, t in enumerate(tensors)]
    return bits, finite and len(quick) == len(tensors)


def is_quick(t: Tensor) -> bool:
    """Whether its words lie one behind the other in memory that NumPy can read."""
    return t.dtype == torch.float32 and t.is_cpu and t.is_contiguous() and not t.is_neg()


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers are, of real tensors."""
    if native.kernels is not None and all(map(is_quick, tensors)):
        return bool(native.kernels.sums_of_words([(t.data_ptr(), t.numel()) for t in tensors])[1])
    small = [t for t in tensors if is_small(t)]
    every = [*([flattened(small)] if small else []), *(t for t in tensors if not is_small(t))]
    return all(math.isfinite(float(end)) for t in every if t.numel() for end in t.aminmax())


def _sums(arrays: Sequence[np.ndarray]) -> list[int]:
    """Small arrays are read together, others eight bytes at once."""
    small = [place for place, array in enumerate(arrays) if 0 < array.size < SMALL]
    sums = [0 if place in small else int(np.add.reduce(_words(a), dtype=np.int64)) for place, a in enumerate(arrays)]
    if small:
        together = [_words(arrays[place]) for place in small]
        starts = [0, *accumulate(len(words) for words in together[:-1])]
        for place, total in zip(small, np.add.reduceat(np.concatenate(together), starts, dtype=np.int64), strict=True):
            sums[place] = int(total)
    return sums


def _words(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.int32 if array.size < SMALL or array.size % 2 else np.int64)


def _bits(t: Tensor) -> Bits:
    t = t.detach()
    flat = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1)
    total = _sum(flat)
    return int(total) if total.device.type == "cpu" else total


def is_small(t: Tensor) -> bool:
    """Whether it is read together with others."""
    return 0 < t.numel() < SMALL and t.dtype == torch.float32 and t.is_cpu


def _sum(flat: Tensor) -> Tensor:
    """() int64."""
    size = flat.element_size()
    whole = len(flat) - len(flat) % (8 // size)
    if flat.storage_offset() % (8 // size):
        whole = 0
    if whole == len(flat):
        return flat.view(torch.int64).sum()  # eight bytes at once: thirty times as quick
    long = flat[:whole].view(torch.int64).sum()
    return long + flat[whole:].view(_WORDS[size]).sum(dtype=torch.int64)
