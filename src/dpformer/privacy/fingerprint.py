r"""A fingerprint of weights, computed where they are: noise is addressed by the weights at which a gradient was taken.

Rows of 4096 words of 32 bits are hashed with NH (Black et al. 1999, UMAC), twice, under keys of the run's secret,

    h = Σ_j (w_2j + k_2j mod 2³²)·(w_2j+1 + k_2j+1 mod 2³²)   mod 2⁶⁴

and the hashes of all rows with SHA-256. For two different rows h is the same with probability at most 2⁻³² over the
keys, both hashes with 2⁻⁶⁴, if whoever chose the rows does not know the secret. Integer arithmetic is the same on every
device, and only 16 bytes a row leave it.
"""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpformer.privacy.randomness import SecureRandom

ROW = 4096  # words of 32 bits
ROWS = 64  # hashed at a time
HASHES = 2


class Fingerprint:
    """Hashes tensors under keys of one secret."""

    def __init__(self, random: "SecureRandom") -> None:
        words = random.within("fingerprint").words(HASHES * ROW // 2, step=0)
        self._keys = torch.from_numpy(words.view(np.int32).reshape(HASHES, ROW).copy())

    def __call__(self, tensors: Iterable[Tensor]) -> str:
        """A hexadecimal digest of dtypes, shapes and values."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(self._rows(tensor.detach().contiguous().view(-1)).cpu().numpy().tobytes())
        return digest.hexdigest()

    def _rows(self, flat: Tensor) -> Tensor:
        """(rows, 2) int64: the hashes of each row, the last one filled up with zeros."""
        each = ROW * 4 // flat.element_size()
        rows = -(-len(flat) // each)
        hashes = torch.empty(rows, HASHES, dtype=torch.int64, device=flat.device)
        keyed = torch.empty(min(rows, ROWS), ROW, dtype=torch.int32, device=flat.device)
        high = torch.empty(len(keyed), ROW // 2, dtype=torch.int64, device=flat.device)
        for at, part in enumerate(flat.split(each * ROWS) if rows else ()):
            if len(part) % each:
                part = torch.cat([part, part.new_zeros(-len(part) % each)])
            words = part.view(torch.int32).view(-1, ROW)
            for place, key in enumerate(self._keys.to(flat.device)):
                torch.add(words, key, out=keyed[: len(words)])
                hashes[at * ROWS : at * ROWS + len(words), place] = _nh(keyed[: len(words)], high[: len(words)])
        return hashes


def _nh(keyed: Tensor, high: Tensor) -> Tensor:
    """(rows,) int64 of (rows, 4096) int32: Σ of the products of two words each, one signed and one not.

    Changes both tensors: `high` is room for (rows, 2048) numbers.
    """
    low = keyed.view(torch.int64)
    torch.bitwise_right_shift(low, 32, out=high)
    return high.mul_(low.bitwise_and_(0xFFFFFFFF)).sum(1)
