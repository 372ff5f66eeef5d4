"""Noise on sums that are on a device, over many tensors together: few launches, however many parameters there are.

    pieces    of sums with consecutive numbers, of one dtype, up to `MOST` numbers together
    flat      one buffer for all of them: a `torch.cat`, unless there is one piece
    noise     on the flat buffer: one launch in Triton (kernels/triton_noise.py), or about 600 torch operations
    back      a `torch._foreach_copy_`

Random words are the same to the bit as on the CPU. Logarithm, sine and cosine are the device's own, in float64; after
rounding to the public grid, sums are the same to the bit unless σ/grid·z + sum/grid is within 2⁻³⁸ of the midpoint of
two grid points: about one number in 10¹¹.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpformer import compat
from dpformer.kernels.on_device import AddNoise, add_noise_on
from dpformer.noise.chacha import BLOCK_WORDS
from dpformer.noise.gaussian import GROUP

if TYPE_CHECKING:
    from dpformer.noise.noisy_sums import Piece

MOST, MOST_IN_TORCH = 1 << 27, 1 << 22  # numbers at a time: operations of torch keep about 60 bytes per number


def release_on_device(pieces: Iterable[Piece], scale: float, per_grid: float, divisor: float) -> None:
    """Each sum ← round(scale·z + per_grid·sum) / divisor, in place; all on one device that has float64."""
    for run in _runs(pieces):
        sums = [piece.sums for piece in run]
        flat = torch.cat(sums) if len(sums) > 1 or not sums[0].is_contiguous() else sums[0]
        kernel = add_noise_on(flat.device)
        if flat.dtype not in (torch.float32, torch.float64):  # rounded to half precision once, at the end
            flat = flat.to(torch.float64)
        if kernel is not None and run[0].numbers.ready is None:
            _in_one_launch(kernel, flat, run[0], (scale, per_grid, divisor))
        else:
            noisy = _numbers(run, len(flat)).mul_(scale).add_(flat.to(torch.float64), alpha=per_grid)
            flat = noisy.round_().div_(divisor)
        if flat is not sums[0]:
            compat.copy_all(sums, list(flat.to(sums[0].dtype).split([piece.count for piece in run])))


def _in_one_launch(kernel: AddNoise, flat: Tensor, first: Piece, constants: tuple[float, float, float]) -> None:
    group, before = divmod(first.start, GROUP)
    blocks = -(-(before + len(flat)) // GROUP) * (GROUP // BLOCK_WORDS)
    numbers = first.numbers
    words = numbers.random.cipher_state(numbers.step, numbers.stream, group * (GROUP // BLOCK_WORDS), blocks)
    bits = struct.unpack("<3q", struct.pack("<3d", *constants))
    kernel(flat, torch.tensor([*words, *bits]).to(flat.device), before)


def _numbers(run: list[Piece], count: int) -> Tensor:
    """(count,) float64, to be overwritten."""
    device = run[0].sums.device
    if run[0].numbers.ready is not None:
        ready = [p.numbers.ready[p.at : p.at + p.count] for p in run if p.numbers.ready is not None]
        return torch.cat(ready).to(device)
    out = torch.empty(count, dtype=torch.float64, device=device)
    run[0].numbers.fill(out, run[0].at)
    return out


def _runs(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces that are processed together."""
    run: list[Piece] = []
    filled = 0
    for whole in pieces:
        kernel = add_noise_on(whole.sums.device)
        most = MOST if kernel is not None and whole.numbers.ready is None else MOST_IN_TORCH
        for at in range(0, whole.count, most):
            count = min(most, whole.count - at)
            piece = (
                whole if count == whole.count else replace(whole, sums=whole.sums[at : at + count], at=at, count=count)
            )
            if run and (filled + count > most or not _continues(run[-1], piece)):
                yield run
                run, filled = [], 0
            run.append(piece)
            filled += count
    if run:
        yield run


def _continues(last: Piece, piece: Piece) -> bool:
    """Whether a piece has the numbers that follow those of another, and its dtype."""
    a, b = last.numbers, piece.numbers
    if (a.ready is None) != (b.ready is None) or last.sums.dtype != piece.sums.dtype:
        return False
    same = a.random is b.random and (a.step, a.stream) == (b.step, b.stream)
    return a.ready is not None or (same and last.start + last.count == piece.start)
