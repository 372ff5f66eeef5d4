"""The keystream of the noise kernel in memory. Imported where Triton is there, with TRITON_INTERPRET=1."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpformer.kernels.triton_noise import keystream_block


@triton.jit  # type: ignore[untyped-decorator]
def _words_kernel(out: Any, state: Any, BLOCKS: tl.constexpr) -> None:
    after = tl.arange(0, BLOCKS)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = keystream_block(state, after.to(tl.uint32))
    at = out + after * 16
    tl.store(at, w0.to(tl.int32, bitcast=True))
    tl.store(at + 1, w1.to(tl.int32, bitcast=True))
    tl.store(at + 2, w2.to(tl.int32, bitcast=True))
    tl.store(at + 3, w3.to(tl.int32, bitcast=True))
    tl.store(at + 4, w4.to(tl.int32, bitcast=True))
    tl.store(at + 5, w5.to(tl.int32, bitcast=True))
    tl.store(at + 6, w6.to(tl.int32, bitcast=True))
    tl.store(at + 7, w7.to(tl.int32, bitcast=True))
    tl.store(at + 8, w8.to(tl.int32, bitcast=True))
    tl.store(at + 9, w9.to(tl.int32, bitcast=True))
    tl.store(at + 10, w10.to(tl.int32, bitcast=True))
    tl.store(at + 11, w11.to(tl.int32, bitcast=True))
    tl.store(at + 12, w12.to(tl.int32, bitcast=True))
    tl.store(at + 13, w13.to(tl.int32, bitcast=True))
    tl.store(at + 14, w14.to(tl.int32, bitcast=True))
    tl.store(at + 15, w15.to(tl.int32, bitcast=True))


def words_on_kernel(state: list[int], blocks: int) -> Tensor:
    """(8·blocks,) int64 of the cipher's state at the first block."""
    out = torch.empty(16 * blocks, dtype=torch.int32)
    _words_kernel[(1,)](out, torch.tensor(state), BLOCKS=blocks)
    return out.view(torch.int64)
