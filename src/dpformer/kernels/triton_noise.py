"""Noise on a flat tensor of sums in one launch, in Triton: the twin of the torch operations in noise/.

    sum ← round(σ/grid · z + sum/grid) / divisor        z by Box–Muller from ChaCha20, as in noise/gaussian.py

Each lane computes two blocks of the keystream, 32 blocks apart: the first holds the words of eight radii, the second
those of their angles, which give sixteen numbers (words come in groups of 512, 256 radii and then 256 angles; a group
is 64 blocks).

**The same numbers.** Words are integers and the same to the bit. Logarithm, sine and cosine differ between libraries by
about an ulp of float64, and compilers may fuse a product and a sum, so x = σ/grid·z + sum/grid, below 2¹⁵, is off by at
most 2⁻³⁸. After rounding the result is the same to the bit unless x is that close to the midpoint of two integers:
about one number in 10¹¹.

Imported only where Triton is installed (`kernels.on_device`). With TRITON_INTERPRET=1 it runs on any device, slowly.
"""

from __future__ import annotations

import math
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

# Lanes of a program, with 16 numbers each; interpreted, the number of programs is what takes time.
LANES = 1 << 14 if os.environ.get("TRITON_INTERPRET") == "1" else 128
SMALLEST = tl.constexpr(2.0**-64)
RADIUS = tl.constexpr(2.0**-63)
ANGLE = tl.constexpr(2 * math.pi * 2.0**-64)
TO_INTEGER = tl.constexpr(2.0**52)  # float64 from here on are integers: adding it, with the same sign, rounds


@triton.jit
def _quarter_round(a, b, c, d):  # type: ignore[no-untyped-def]
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _word(state, place: tl.constexpr, like):  # type: ignore[no-untyped-def]
    """A word of the state, in every lane."""
    return tl.load(state + place).to(tl.uint32) + like * 0


@triton.jit
def keystream_block(state, after):  # type: ignore[no-untyped-def]
    """Sixteen words (lanes,) uint32: the blocks `after` (lanes,) uint32 places behind the first."""
    s0, s1 = _word(state, 0, after), _word(state, 1, after)
    s2, s3 = _word(state, 2, after), _word(state, 3, after)
    s4, s5 = _word(state, 4, after), _word(state, 5, after)
    s6, s7 = _word(state, 6, after), _word(state, 7, after)
    s8, s9 = _word(state, 8, after), _word(state, 9, after)
    s10, s11 = _word(state, 10, after), _word(state, 11, after)
    s12, s13 = _word(state, 12, after) + after, _word(state, 13, after)
    s14, s15 = _word(state, 14, after), _word(state, 15, after)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return (
        x0 + s0, x1 + s1, x2 + s2, x3 + s3, x4 + s4, x5 + s5, x6 + s6, x7 + s7,
        x8 + s8, x9 + s9, x10 + s10, x11 + s11, x12 + s12, x13 + s13, x14 + s14, x15 + s15,
    )  # fmt: skip


@triton.jit
def _float(low, high):  # type: ignore[no-untyped-def]
    """The float64 nearest to the signed word of these halves."""
    word = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return word.to(tl.int64, bitcast=True).to(tl.float64)


@triton.jit
def _release(sums, at, count, z, scale, per_grid, divisor):  # type: ignore[no-untyped-def]
    mine = (at >= 0) & (at < count)
    before = tl.load(sums + at, mask=mine, other=0.0).to(tl.float64)
    x = scale * z + per_grid * before
    to_integer = tl.full(x.shape, TO_INTEGER, tl.float64)
    signed = tl.where(x < 0, -to_integer, to_integer)
    rounded = tl.where(tl.abs(x) < to_integer, (x + signed) - signed, x)
    tl.store(sums + at, (rounded / divisor).to(sums.dtype.element_ty), mask=mine)


@triton.jit
def _pair(sums, at, count, r_low, r_high, a_low, a_high, scale, per_grid, divisor):  # type: ignore[no-untyped-def]
    """Two numbers of a radius and an angle, 256 places apart."""
    magnitude = tl.abs(_float(r_low, r_high))
    smallest = tl.full(magnitude.shape, SMALLEST, tl.float64)
    u = magnitude * tl.full(magnitude.shape, RADIUS, tl.float64) + smallest
    radius = tl.sqrt(tl.full(magnitude.shape, -2.0, tl.float64) * tl.log(u))
    angle = _float(a_low, a_high) * tl.full(magnitude.shape, ANGLE, tl.float64)
    _release(sums, at, count, radius * tl.cos(angle), scale, per_grid, divisor)
    _release(sums, at + 256, count, radius * tl.sin(angle), scale, per_grid, divisor)


@triton.jit(do_not_specialize=["count", "before"])
def noise_kernel(sums, state, count, before, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.load(state + 16).to(tl.float64, bitcast=True)
    per_grid = tl.load(state + 17).to(tl.float64, bitcast=True)
    divisor = tl.load(state + 18).to(tl.float64, bitcast=True)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    group, inside = lane // 32, lane % 32
    block = (group * 64 + inside).to(tl.uint32)
    r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15 = keystream_block(state, block)
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15 = keystream_block(state, block + 32)
    at = group.to(tl.int64) * 512 + inside * 8 - before
    _pair(sums, at, count, r0, r1, a0, a1, scale, per_grid, divisor)
    _pair(sums, at + 1, count, r2, r3, a2, a3, scale, per_grid, divisor)
    _pair(sums, at + 2, count, r4, r5, a4, a5, scale, per_grid, divisor)
    _pair(sums, at + 3, count, r6, r7, a6, a7, scale, per_grid, divisor)
    _pair(sums, at + 4, count, r8, r9, a8, a9, scale, per_grid, divisor)
    _pair(sums, at + 5, count, r10, r11, a10, a11, scale, per_grid, divisor)
    _pair(sums, at + 6, count, r12, r13, a12, a13, scale, per_grid, divisor)
    _pair(sums, at + 7, count, r14, r15, a14, a15, scale, per_grid, divisor)


@torch.library.custom_op("dpformer::add_noise", mutates_args={"sums"})
def add_noise(sums: Tensor, state: Tensor, before: int) -> None:
    """sums (count,) ← round(scale·z + per_grid·sums) / divisor, for the numbers z from `before` in the first group.

    An operator of torch, so that profilers and `training.device_calls` see it.

    Args:
        sums: contiguous, in float32 or float64; at most 2³¹ − 1 of them.
        state: (19,) int64 on the same device: the 16 words of the cipher's state at the first block of the first group,
            and the bits of scale, per_grid and divisor, in float64.
        before: numbers of the first group that are skipped.
    """
    lanes = -(-(before + sums.numel()) // 512) * 32
    noise_kernel[(triton.cdiv(lanes, LANES),)](sums, state, sums.numel(), before, LANES=LANES)
