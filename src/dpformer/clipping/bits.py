"""The sum of the bits of a tensor, read as whole numbers, modulo 2⁶⁴: whether its contents are what they were.

A guard against mistakes, not against forgery: nearly every change changes the sum. The model and its gradients are
looked at in every step, and most of their tensors are small, so small ones are read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flattened

Bits = int | Tensor  # a tensor, () int64, where it was computed on another device
SMALL = 1 << 12  # numbers
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(t: Tensor) -> Bits:
    """The sum of words of eight bytes; of four for a small tensor of float32 on the CPU."""
    t = t.detach()
    if t.dtype == torch.float32 and t.is_cpu:
        words = t.numpy().reshape(-1).view(np.int32)
        if len(words) < SMALL:
            return int(np.add.reduce(words, dtype=np.int64))
        if len(words) % 2 == 0:
            return int(np.add.reduce(words.view(np.int64)))
    flat = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1)
    total = _sum(flat)
    return int(total) if total.device.type == "cpu" else total


def bits_of_all(tensors: Sequence[Tensor]) -> list[Bits]:
    """The same of many tensors."""
    small = [place for place, t in enumerate(tensors) if is_small(t)]
    found: dict[int, Bits] = {}
    if len(small) > 1:
        together = [tensors[place] for place in small]
        with torch.no_grad():
            words = flattened(together).numpy().view(np.int32)
        starts = [0, *accumulate(t.numel() for t in together[:-1])]
        sums = np.add.reduceat(words, starts, dtype=np.int64).tolist()
        found = dict(zip(small, sums, strict=True))
    return [found[place] if place in found else bits_of(t) for place, t in enumerate(tensors)]


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
