r"""A keyed fingerprint of tensors, computed on their device: noise is addressed by the sum to which it is added.

Rows of 4096 words of 32 bits are hashed with NH (Black et al. 1999, UMAC), twice, under keys of the run's secret,

    h = Σ_j (w_2j + k_2j mod 2³²)·(w_2j+1 + k_2j+1 mod 2³²)   mod 2⁶⁴

and the hashes of all rows with SHA-256. Small tensors are concatenated and share rows; the shapes, which are hashed
too, distinguish them. For two different rows h is the same with probability at most 2⁻³² over the keys, both hashes
with 2⁻⁶⁴, if the rows were chosen without knowing the secret. Integer arithmetic is the same on every device. On
devices other than the CPU, rows of all tensors are hashed together and leave the device in one copy, 16 bytes per row.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dpformer.kernels import native

if TYPE_CHECKING:
    from dpformer.noise.randomness import SecureRandom

ROW = 4096  # words of 32 bits
ROWS, CPU_ROWS = 64, 32  # a longer tensor has rows of its own; rows hashed at a time on the CPU
DEVICE_WORDS = ROW << 11  # hashed at a time on other devices
HASHES = 2


class Fingerprint:
    """Hashes tensors under keys of one secret."""

    def __init__(self, random: "SecureRandom") -> None:
        words = random.within("fingerprint").words(HASHES * ROW // 2, step=0)
        self._keys = torch.from_numpy(words.view(np.int32).reshape(HASHES, ROW).copy())
        # Contribution of the zeros after the first words of a row, for each number of words: products of keys alone.
        products = _products(self._keys.clone(), torch.empty(HASHES, ROW // 2, dtype=torch.int64))
        self._there: dict[torch.device, Tensor] = {}  # copies of the keys
        self._after = torch.cat([products.flip(1).cumsum(1).flip(1), torch.zeros(HASHES, 1, dtype=torch.int64)], 1)

    def __call__(self, tensors: Iterable[Tensor]) -> str:
        """A hexadecimal digest of dtypes, shapes and values."""
        return self.read(tensors)[0]

    def read(self, tensors: Iterable[Tensor], flag: Tensor | None = None) -> tuple[str, bool]:
        """The digest, and the value of a flag, (), that is on the device of the tensors: read in the same copy."""
        every = [tensor.detach().contiguous() for tensor in tensors]
        digest = hashlib.sha256(repr([(tensor.dtype, tuple(tensor.shape)) for tensor in every]).encode())
        words = [_words(tensor.view(-1)) for tensor in every]
        together: dict[object, list[int]] = {}  # positions of tensors that share rows
        for place, some in enumerate(words):
            together.setdefault(place if len(some) > ROWS * ROW else some.device, []).append(place)
        groups = [[words[n] for n in places] for places in together.values()]
        hashes, is_set = self._hashes(groups, flag)
        for places, found in zip(together.values(), hashes, strict=True):
            digest.update(repr(places).encode())
            digest.update(found)
        return digest.hexdigest(), is_set

    def _hashes(self, groups: list[list[Tensor]], flag: Tensor | None) -> tuple[list[bytes], bool]:
        """The hashes of each group of words, in rows whose last is padded with zeros; and the flag."""
        there: dict[torch.device, list[int]] = {}
        for n, parts in enumerate(groups):
            if not parts[0].is_cpu:
                there.setdefault(parts[0].device, []).append(n)
        found = {n: self._of_group(parts) for n, parts in enumerate(groups) if parts[0].is_cpu}
        for device, places in there.items():
            with_flag = flag if flag is not None and flag.device == device else None
            rows = self._on_device([groups[n] for n in places], with_flag)
            if with_flag is not None:
                flag, rows = torch.tensor(bool(rows[-1, 0])), rows[:-1]
            lengths = [-(-sum(map(len, groups[n])) // ROW) for n in places]
            for n, some in zip(places, np.split(rows, np.cumsum(lengths)[:-1]), strict=True):
                found[n] = some.tobytes()
        return [found[n] for n in range(len(groups))], flag is None or bool(flag)

    def _of_group(self, parts: list[Tensor]) -> bytes:
        """The hashes of rows of concatenated words, on the CPU."""
        if native.supports(*parts, dtype=torch.int32):
            return self._compiled(parts)
        words = torch.cat(parts) if len(parts) > 1 else parts[0]
        whole = len(words) - len(words) % ROW
        found = self._of_rows(words[:whole].view(-1, ROW)).numpy().tobytes()
        if whole < len(words):
            last = torch.cat([words[whole:], words.new_zeros(len(words) % 2)])  # words are multiplied in pairs
            found += self._of_rows(last[None]).numpy().tobytes()
        return found

    def _on_device(self, groups: Sequence[list[Tensor]], flag: Tensor | None) -> np.ndarray:
        """(rows, 2) int64 of all groups, and a last row with the flag, if there is one."""
        device = groups[0][0].device
        if device not in self._there:
            self._there[device] = self._keys.to(device)
        hashes = [_in_torch(words, self._there[device]) for words in _padded(groups)]
        if flag is not None:
            hashes.append(flag.to(torch.int64).expand(1, HASHES))
        return (torch.cat(hashes) if len(hashes) > 1 else hashes[0]).cpu().numpy()

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
        hashes = _in_numpy(np.from_dlpack(words), self._keys[:, : words.shape[1]].numpy())
        return hashes.add_(self._after[:, words.shape[1] // 2])


def _words(flat: Tensor) -> Tensor:
    """(n,) int32: the bits of these numbers, padded with zeros to whole words."""
    flat, each = flat.resolve_conj().resolve_neg(), max(1, 4 // flat.element_size())
    if len(flat) % each:
        flat = torch.cat([flat, flat.new_zeros(each - len(flat) % each)])
    elif flat.storage_offset() % each or flat.stride(0) != 1:  # not aligned words in memory
        flat = torch.empty(len(flat), dtype=flat.dtype, device=flat.device).copy_(flat)
    return flat.view(torch.int32)


def _padded(groups: Sequence[list[Tensor]]) -> Iterator[Tensor]:
    """(rows, 4096) the words of all groups, the last row of each padded with zeros, in large pieces."""
    zeros = groups[0][0].new_zeros(ROW)
    pieces: list[Tensor] = []
    filled = 0
    for parts in groups:
        padding = -sum(map(len, parts)) % ROW
        for part in [*parts, zeros[:padding]]:
            at = 0
            while at < len(part):
                some = part[at : at + DEVICE_WORDS - filled]
                pieces.append(some)
                at, filled = at + len(some), filled + len(some)
                if filled == DEVICE_WORDS:
                    yield torch.cat(pieces).view(-1, ROW)
                    pieces, filled = [], 0
    if pieces:
        yield torch.cat(pieces).view(-1, ROW)


def _in_torch(words: Tensor, keys: Tensor) -> Tensor:
    keyed = words[:, None] + keys  # (rows, 2, 4096)
    return _products(
        keyed, torch.empty(*keyed.shape[:2], words.shape[1] // 2, dtype=torch.int64, device=words.device)
    ).sum(2)


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
    """(…, n / 2) int64 of (…, n) int32: products of pairs of words, one signed and one unsigned.

    Overwrites both tensors: `high` is scratch space.
    """
    low = keyed.view(torch.int64)
    torch.bitwise_right_shift(low, 32, out=high)
    return high.mul_(low.bitwise_and_(0xFFFFFFFF))
