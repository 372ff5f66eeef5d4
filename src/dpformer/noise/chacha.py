"""ChaCha20 (RFC 8439) in tensor operations: the keystream of a key, computed on any device.

The state is a matrix of 4 × 4 words of 32 bits,

    constants   4 words
    key         8 words
    counter     1 word, the number of the block
    nonce       3 words

and a block of the keystream is the state after twenty rounds plus the initial state. Words are int32 here, whose
addition wraps like that of uint32; all blocks are computed at once, as (4, blocks) tensors, one per row.
"""

import struct

import torch
from torch import Tensor

CONSTANTS = struct.unpack("<4i", b"expand 32-byte k")
BLOCK_WORDS = 8  # words of 64 bits in a block of the keystream


def keystream(key: bytes, counter: int, blocks: int, device: torch.device | str) -> Tensor:
    """(8·blocks,) int64: blocks of the keystream, on this device; `counter`: nonce (96 bits) and first block (32).

    The number of operations does not depend on `blocks`, and one copy of 16 words reaches the device.
    """
    start = _start(torch.tensor(initial_state(key, counter, blocks), dtype=torch.int32).to(device), blocks)
    a, b, c, d = start
    for _ in range(10):
        a, b, c, d = _quarter_rounds(a, b, c, d)  # the columns
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        a, b, c, d = _quarter_rounds(a, b, c, d)  # the diagonals
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    words = torch.cat([a, b, c, d]).add_(torch.cat(start))  # (16, blocks)
    low, high = (words[half::2].T.to(torch.int64) for half in (0, 1))  # (blocks, 8) each
    return ((high << 32) | (low & 0xFFFFFFFF)).reshape(-1)


def initial_state(key: bytes, counter: int, blocks: int) -> list[int]:
    """The 16 words of the state of the first block, signed."""
    if (last := (counter & 0xFFFFFFFF) + blocks) > 2**32:
        raise ValueError(f"block {last} is beyond the counter")
    return [*CONSTANTS, *struct.unpack("<8i", key), *struct.unpack("<4i", counter.to_bytes(16, "little"))]


def _start(state: Tensor, blocks: int) -> list[Tensor]:
    """The four rows of the state before the rounds, (4, blocks) each; the first word of the last row counts blocks."""
    *rows, last = state.view(4, 4, 1).expand(4, 4, blocks).unbind()
    last = last.clone()
    last[0] += torch.arange(blocks, dtype=torch.int32, device=state.device)  # wraps like uint32
    return [*rows, last]


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four quarter rounds side by side."""
    a = a + b
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def _rotate(x: Tensor, by: int) -> Tensor:
    """Rotate to the left; the right shift extends the sign of an int32, which is masked out."""
    return (x << by) | ((x >> (32 - by)) & ((1 << by) - 1))
