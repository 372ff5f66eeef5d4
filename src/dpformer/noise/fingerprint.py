r"""A keyed fingerprint of tensors, computed on their device: noise is addressed by the sum to which it is added.

Rows of 4096 words of 32 bits are hashed with NH (Black et al. 1999, UMAC), twice, under keys of the run's secret,

    h = Σ_j (w_2j + k_2j mod 2³²)·(w_2j+1 + k_2j+1 mod 2³²)   mod 2⁶⁴

and the hashes of all rows with SHA-256. Small tensors are concatenated and share rows; the shapes, which are hashed
too, distinguish them. For two different rows h is the same with probability at most 2⁻³² over the keys, both hashes
with 2⁻⁶⁴, if the rows were chosen without knowing the secret. Integer arithmetic is the same on every device, and only
16 bytes per row leave it.
"""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dpformer.kernels import native

if TYPE_CHECKING:
    from dpformer.noise.randomness import SecureRandom

ROW = 4096  # words of 32 bits
ROWS, CPU_ROWS = 64, 32  # hashed at a time
HASHES = 2


class Fingerprint:
    """Hashes tensors under keys of one secret."""

    def __init__(self, random: "SecureRandom") -> None:
        words = random.within("fingerprint").words(HASHES * ROW // 2, step=0)
        self._keys = torch.from_numpy(words.view(np.int32).reshape(HASHES, ROW).copy())
        # Contribution of the zeros after the first words of a row, for each number of words: products of keys alone.
        products = _products(self._keys.clone(), torch.empty(HASHES, ROW // 2, dtype=torch.int64))
        self._after = torch.cat([products.flip(1).cumsum(1).flip(1), torch.zeros(HASHES, 1, dtype=torch.int64)], 1)

    def __call__(self, tensors: Iterable[Tensor]) -> str:
        """A hexadecimal digest of dtypes, shapes and values."""
        every = [tensor.detach().contiguous() for tensor in tensors]
        digest = hashlib.sha256(repr([(tensor.dtype, tuple(tensor.shape)) for tensor in every]).encode())
        words = [_words(tensor.view(-1)) for tensor in every]
        together: dict[object, list[int]] = {}  # positions of tensors that share rows
        for place, some in enumerate(words):
            together.setdefault(place if len(some) > ROWS * ROW else some.device, []).append(place)
        for places in together.values():
            digest.update(repr(places).encode())
            digest.update(self._hashes([words[n] for n in places]))
        return digest.hexdigest()

    def _hashes(self, parts: list[Tensor]) -> bytes:
        """The hashes of each row of concatenated words, with the last row padded with zeros."""
        if native.kernels is not None and parts[0].is_cpu:
            return self._compiled(parts)
        words = torch.cat(parts) if len(parts) > 1 else parts[0]
        whole = len(words) - len(words) % ROW
        found = self._of_rows(words[:whole].view(-1, ROW)).cpu().numpy().tobytes()
        if whole < len(words):
            last = torch.cat([words[whole:], words.new_zeros(len(words) % 2)])  # words are multiplied in pairs
            found += self._of_rows(last[None]).cpu().numpy().tobytes()
        return found

    def _compiled(self, parts: list[Tensor]) -> bytes:
        """The same without concatenating the words."""
        assert native.kernels is not None
        count = sum(part.numel() for part in parts)
        hashes = np.empty((-(-count // ROW), HASHES), dtype=np.int64)
        native.kernels.hash_words([(part.data_ptr(), part.numel()) for part in parts], self._keys.numpy(), hashes, ROW)
        if count % ROW:
            hashes[-1] += self._after[:, (count % ROW + 1) // 2].numpy()
        return hashes.tobytes()

    def _of_rows(self, words: Tensor) -> Tensor:
        """(rows, 2) int64 from (rows, ≤ 4096) int32; missing words count as zeros."""
        keys = self._keys[:, : words.shape[1]].to(words.device)
        hashes = _in_numpy(np.from_dlpack(words), keys.numpy()) if words.is_cpu else _in_torch(words, keys)
        return hashes.add_(self._after[:, words.shape[1] // 2].to(words.device))


def _words(flat: Tensor) -> Tensor:
    """(n,) int32: the bits of these numbers, padded with zeros to whole words."""
    flat, each = flat.resolve_conj().resolve_neg(), max(1, 4 // flat.element_size())
    if len(flat) % each:
        flat = torch.cat([flat, flat.new_zeros(each - len(flat) % each)])
    elif flat.storage_offset() % each or flat.stride(0) != 1:  # not aligned words in memory
        flat = torch.empty(len(flat), dtype=flat.dtype, device=flat.device).copy_(flat)
    return flat.view(torch.int32)


def _in_torch(words: Tensor, keys: Tensor) -> Tensor:
    width = words.shape[1]
    hashes = torch.empty(len(words), HASHES, dtype=torch.int64, device=words.device)
    keyed = torch.empty(min(len(words), ROWS), width, dtype=torch.int32, device=words.device)
    high = torch.empty(len(keyed), width // 2, dtype=torch.int64, device=words.device)
    for at in range(0, len(words), ROWS):
        some = words[at : at + ROWS]
        for place, key in enumerate(keys):
            torch.add(some, key, out=keyed[: len(some)])
            hashes[at : at + len(some), place] = _products(keyed[: len(some)], high[: len(some)]).sum(1)
    return hashes


def _in_numpy(words: np.ndarray, keys: np.ndarray) -> Tensor:
    """The same on the CPU, where calling torch costs more than its arithmetic, in pieces that fit in the cache."""
    hashes = np.empty((len(words), HASHES), dtype=np.int64)
    keyed = np.empty((min(len(words), CPU_ROWS), words.shape[1]), dtype=np.int32)
    high = np.empty((len(keyed), words.shape[1] // 2), dtype=np.int64)
    for at in range(0, len(words), CPU_ROWS):
        some = words[at : at + CPU_ROWS]
        for place, key in enumerate(keys):
            low = np.add(some, key, out=keyed[: len(some)]).view(np.int64)
            products = np.right_shift(low, 32, out=high[: len(some)])
            products *= np.bitwise_and(low, 0xFFFFFFFF, out=low)
            hashes[at : at + len(some), place] = products.sum(1)
    return torch.from_numpy(hashes)


def _products(keyed: Tensor, high: Tensor) -> Tensor:
    """(rows, n / 2) int64 of (rows, n) int32: products of pairs of words, one signed and one unsigned.

    Overwrites both tensors: `high` is scratch space.
    """
    low = keyed.view(torch.int64)
    torch.bitwise_right_shift(low, 32, out=high)
    return high.mul_(low.bitwise_and_(0xFFFFFFFF))
