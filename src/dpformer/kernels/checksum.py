"""A sum of the bits of a tensor, read as whole numbers, modulo 2⁶⁴: whether its contents are what they were.

A guard against mistakes, not against forgery: each word counts by its place and is mixed first, so that changes of
equal size (signs turned, a factor of two, words that change places) do not cancel. The model and its gradients are
looked at in every step, and most of their tensors are small, so small ones are read together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dpformer.compat import flattened
from dpformer.kernels import native

Bits = int | Tensor  # a tensor, () int64, where it was computed on another device
SMALL = 1 << 12  # words
AT_ONCE = 1 << 16  # words that are mixed at a time
ON_DEVICE = 1 << 22  # the same on other devices, of all tensors together: few calls, each with much to do
_MIX = -7046029254386353131  # an odd number of 64 bits: 2⁶⁴ over the golden ratio
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(t: Tensor) -> Bits:
    """Of one tensor."""
    return bits_of_all([t])[0]


def bits_of_all(tensors: Sequence[Tensor]) -> list[Bits]:
    """Of each; what is summed depends on the tensor, and on what there is to read it."""
    return bits_and_finite(tensors)[0]


def bits_and_finite(tensors: Sequence[Tensor]) -> tuple[list[Bits], bool]:
    """The same, and whether all numbers are known to be finite by it: False where nobody has looked."""
    if not all(t.is_cpu for t in tensors):
        here = [t for t in tensors if t.is_cpu]
        on_cpu, on_devices = iter(bits_of_all(here)), iter(_on_devices([t for t in tensors if not t.is_cpu]))
        return [next(on_cpu if t.is_cpu else on_devices) for t in tensors], False
    if native.reads_tensors():
        assert native.kernels is not None
        read, finite = native.kernels.sums_of_tensors(list(tensors))
        return [_bits(t) if bits is None else bits for t, bits in zip(tensors, read, strict=True)], finite
    if native.kernels is None:
        quick, finite = [place for place, t in enumerate(tensors) if is_single(t)], False
        sums = _sums([tensors[place].detach().reshape(-1).view(torch.int32) for place in quick])
    else:
        quick = [place for place, t in enumerate(tensors) if _is_words(t)]
        sums, finite = native.kernels.sums_of_words([_place(tensors[place]) for place in quick])
    found: dict[int, Bits] = dict(zip(quick, sums, strict=True))
    bits = [found[place] if place in found else _bits(t) for place, t in enumerate(tensors)]
    return bits, finite and len(quick) == len(tensors) and all(t.dtype == torch.float32 for t in tensors)


def equal(before: Sequence[Bits], now: Sequence[Bits]) -> list[bool]:
    """Which sums are what they were; those on a device are compared there, and all are read at once."""
    same = [type(a) is type(b) and (isinstance(a, Tensor) or a == b) for a, b in zip(before, now, strict=True)]
    devices: dict[torch.device, list[int]] = {}
    for place, (a, b) in enumerate(zip(before, now, strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            same[place] = a.device == b.device
            devices.setdefault(a.device, []).append(place)
    for places in devices.values():
        there = [place for place in places if same[place]]
        if there:
            agree = _stacked([before[place] for place in there]) == _stacked([now[place] for place in there])
            for place, is_same in zip(there, agree.tolist(), strict=True):
                same[place] = is_same
    return same


def is_single(t: Tensor) -> bool:
    """Whether it is in float32, one behind the other in memory that NumPy can read."""
    return t.dtype == torch.float32 and _is_words(t)


def _is_words(t: Tensor) -> bool:
    """Whether it is whole words of 32 bits, one behind the other in memory of the CPU."""
    if not (t.is_cpu and t.layout == torch.strided and t.is_contiguous()) or t.is_neg() or t.is_conj():
        return False
    return t.dtype == torch.float32 or t.numel() * t.element_size() % 4 == 0


def _place(t: Tensor) -> tuple[int, int]:
    """Its address and words."""
    return t.data_ptr(), t.numel() if t.dtype == torch.float32 else t.numel() * t.element_size() // 4


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers are, of real tensors."""
    if native.kernels is not None and all(map(is_single, tensors)):
        return bool(native.kernels.sums_of_words([_place(t) for t in tensors])[1])
    small = [t for t in tensors if is_small(t)]
    every = [*([flattened(small)] if small else []), *(t for t in tensors if not is_small(t))]
    return all(math.isfinite(float(end)) for t in every if t.numel() for end in t.aminmax())


def is_small(t: Tensor) -> bool:
    """Whether it is read together with others."""
    return 0 < t.numel() < SMALL and t.dtype == torch.float32 and t.is_cpu


def _sums(words: Sequence[Tensor]) -> list[int]:
    """Small ones are read together."""
    small = {place: len(some) for place, some in enumerate(words) if 0 < len(some) < SMALL}
    sums = {place: int(_sum(some)) for place, some in enumerate(words) if place not in small}
    if small:
        lengths = np.array(list(small.values()))
        starts = lengths.cumsum() - lengths
        odd = 2 * (np.arange(lengths.sum()) - np.repeat(starts, lengths)) + 1
        mixed = _mixed(torch.cat([words[place] for place in small]), torch.from_numpy(odd)).numpy()
        sums.update(zip(small, np.add.reduceat(mixed, starts).tolist(), strict=True))
    return [sums[place] for place in range(len(words))]


def _bits(t: Tensor) -> int:
    """Of a tensor on the CPU."""
    return int(_sum(_words(t)))


def _words(t: Tensor) -> Tensor:
    """(n,) whole numbers that hold its bits."""
    t = t.detach()
    flat = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1)
    return flat.resolve_neg().view(_WORDS[flat.element_size()])


def _sum(words: Tensor) -> Tensor:
    """() int64."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), AT_ONCE):
        some = words[start : start + AT_ONCE]
        total += _mixed(some, _odd(start, len(some), words.device)).sum()
    return total


def _on_devices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """() int64 of each, on its device: all tensors of one kind are read together."""
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for place, t in enumerate(tensors):
        words = _words(t)
        kinds.setdefault((words.device, words.dtype), []).append((place, words))
    found: dict[int, list[Tensor]] = {place: [] for place in range(len(tensors))}
    for some in kinds.values():
        for pieces in _in_turn(some):
            for (place, _, _), total in zip(pieces, _sums_together(pieces), strict=True):
                found[place].append(total)
    return [
        parts[0] if len(parts) == 1 else torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.int64)
        for parts in found.values()
    ]


Piece = tuple[int, int, Tensor]  # the place of a tensor, where in it the words begin, the words


def _in_turn(some: Sequence[tuple[int, Tensor]]) -> Iterator[list[Piece]]:
    """Pieces of all tensors, at most `ON_DEVICE` words at a time."""
    waiting: list[Piece] = []
    for place, words in some:
        for start in range(0, len(words), ON_DEVICE):
            piece = words[start : start + ON_DEVICE]
            if waiting and sum(len(w) for _, _, w in waiting) + len(piece) > ON_DEVICE:
                yield waiting
                waiting = []
            waiting.append((place, start, piece))
    if waiting:
        yield waiting


def _sums_together(pieces: Sequence[Piece]) -> Sequence[Tensor]:
    """() int64 of each piece: differences of a running sum, which is exact modulo 2⁶⁴."""
    lengths = [len(words) for _, _, words in pieces]
    device = pieces[0][2].device
    if len(pieces) == 1:
        (_, start, words) = pieces[0]
        return [_mixed(words, _odd(start, len(words), device)).sum()]
    first = _odd(0, max(lengths), device)
    places = [first[: len(words)] if not start else _odd(start, len(words), device) for _, start, words in pieces]
    running = _mixed(torch.cat([words for _, _, words in pieces]), torch.cat(places)).cumsum(0)
    ends = torch.stack([running[end - 1] for end in accumulate(lengths)])
    return ends.diff(prepend=ends.new_zeros(1)).unbind()


def _stacked(every: Sequence[Bits]) -> Tensor:
    return torch.stack([one for one in every if isinstance(one, Tensor)])


def _odd(start: int, count: int, device: torch.device) -> Tensor:
    """An odd number for each place of a word."""
    return torch.arange(2 * start + 1, 2 * (start + count), 2, device=device)


def _mixed(words: Tensor, odd: Tensor) -> Tensor:
    """(n,) int64: what each word adds to the sum, at its place."""
    mixed = (words + odd).mul_(_MIX)
    mixed ^= mixed >> 29
    return mixed.mul_(odd)
