"""Secure random numbers with an address: a pure function of (key, context, step, stream).

ChaCha20 under a key of the operating system: without the key, the numbers cannot be told from random ones (then the
guarantee is computational, as with every generator that is not a coin). Its counter of 128 bits is

    step (48 bits) | stream (48 bits) | block of 64 bytes (32 bits)

so no two addresses share a block, and the state to keep is the key and the step. Everything else, what the numbers are
for, the configuration, the data, goes into `context`, from which the key of the cipher is derived (HMAC-SHA256): the
same key in another context gives other numbers. On the CPU the cipher is that of OpenSSL; on another device the same
keystream is made there (chacha.py), so numbers are never copied from one device to the other.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from concurrent.futures import ThreadPoolExecutor
from threading import local

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from torch import Tensor

from dpformer.accounting.arguments import whole
from dpformer.noise.chacha import BLOCK_WORDS, keystream
from dpformer.noise.gaussian import GROUP, Workspace, normal_of_words

KEY_BYTES = 32
CHUNK = 2**16  # numbers made at a time by a thread of the CPU: they stay in cache
PIECE = 2**22  # numbers made at a time on another device
MOST_STEPS, MOST_STREAMS, MOST_BLOCKS = 2**48, 2**48, 2**32
MOST_NUMBERS = MOST_BLOCKS * BLOCK_WORDS  # of a stream
_ZEROS = bytes(8 * CHUNK)
_thread = local()


class SecureRandom:
    """Random numbers addressed by step and stream.

    Args:
        context: what the numbers are for and what they depend on; any text.
        key: 32 secret bytes; by default new ones from the operating system.
        seed: for tests only, instead of a key. Whoever knows it can remove the noise: `private` is then False.
    """

    def __init__(self, context: str = "", *, key: bytes | None = None, seed: int | None = None) -> None:
        if key is not None and seed is not None:
            raise ValueError("give a key or a seed, not both")
        if key is None:
            key = os.urandom(KEY_BYTES) if seed is None else _key_of_seed(seed)
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(f"key must be {KEY_BYTES} bytes, not {type(key).__name__} of length {len(key)}")
        self.private = seed is None
        self.context = context
        self._key = key
        self._cipher_key = hmac.digest(key, context.encode(), hashlib.sha256)

    @property
    def description(self) -> str:
        """One sentence for privacy statements."""
        if self.private:
            return "random numbers from ChaCha20 under a key of the operating system"
        return "random numbers from a seed: NOT private, whoever knows the seed can undo the noise (for tests only)"

    def within(self, context: str) -> SecureRandom:
        """The same secret, for other numbers: a narrower context. Lengths are part of it, so none can be mistaken."""
        narrower = SecureRandom(f"{len(self.context)}:{self.context}/{context}", key=self._key)
        narrower.private = self.private
        return narrower

    def words(self, count: int, *, step: int, stream: int = 0, start: int = 0) -> np.ndarray:
        """(count,) uint64, uniform; the words `start` and on of this address."""
        block, skipped = divmod(whole("start", start, 0), BLOCK_WORDS)
        cipher = self._cipher(step, stream, block)
        return np.frombuffer(cipher.update(bytes(8 * (skipped + count))), dtype="<u8")[skipped:]

    def fill_words(self, out: memoryview, count: int, *, step: int, stream: int, group: int) -> None:
        """`count` words of this address, from a group of normal numbers on, into bytes; 63 more have room."""
        cipher, zeros = self._cipher(step, stream, group * GROUP // BLOCK_WORDS), memoryview(_ZEROS)
        for done in range(0, count, CHUNK):
            cipher.update_into(zeros[: 8 * min(CHUNK, count - done)], out[8 * done :])

    def normal(self, count: int, *, step: int, stream: int = 0, start: int = 0) -> np.ndarray:
        """(count,) float64 standard normal numbers (gaussian.py); the numbers `start` and on of this address."""
        out = torch.empty(count, dtype=torch.float64)
        self.fill_normal(out, step=step, stream=stream, start=start)
        return out.numpy()

    def fill_normal(self, out: Tensor, *, step: int, stream: int = 0, start: int = 0) -> None:
        """The same numbers into a tensor of float64, shape (count,), made on its device."""
        if not len(out):
            return
        before = whole("start", start, 0) % GROUP
        groups = -(-(before + len(out)) // GROUP)  # those in which the numbers lie
        if before or groups * GROUP != len(out):
            whole_groups = torch.empty(groups * GROUP, dtype=torch.float64, device=out.device)
            self._fill_groups(whole_groups, step, stream, start // GROUP)
            out.copy_(whole_groups[before : before + len(out)])
        else:
            self._fill_groups(out, step, stream, start // GROUP)

    def _fill_groups(self, out: Tensor, step: int, stream: int, group: int) -> None:
        """Whole groups, from this one on."""
        if out.device.type != "cpu":
            for done in range(0, len(out), PIECE):
                part = out[done : done + PIECE]
                counter = self._counter(step, stream, (group * GROUP + done) // BLOCK_WORDS)
                part.copy_(normal_of_words(keystream(self._cipher_key, counter, len(part) // BLOCK_WORDS, out.device)))
            return
        threads = min(torch.get_num_threads(), len(out) // CHUNK)
        if threads <= 1:
            self._fill_here(out, step, stream, group)
            return
        each = -(-len(out) // (threads * GROUP)) * GROUP
        with ThreadPoolExecutor(threads) as pool:
            parts = enumerate(out.split(each))
            jobs = [pool.submit(self._fill_here, p, step, stream, group + i * each // GROUP) for i, p in parts]
            for job in jobs:
                job.result()

    def _fill_here(self, out: Tensor, step: int, stream: int, group: int) -> None:
        """Whole groups on the CPU, by one thread, in pieces that stay in cache."""
        if not hasattr(_thread, "workspace"):
            _thread.workspace = Workspace(CHUNK)
        workspace: Workspace = _thread.workspace
        for part in out.split(CHUNK):
            self.fill_words(memoryview(workspace.words), len(part), step=step, stream=stream, group=group)
            workspace.normal(part)
            group += CHUNK // GROUP

    def state_dict(self) -> dict[str, object]:
        """The secret: whoever has it can undo the noise. Plain types, for `torch.load(weights_only=True)`."""
        return {"key": self._key.hex(), "private": self.private}

    def with_state(self, state: dict[str, object]) -> SecureRandom:
        """This context under the secret of `state`."""
        if set(state) != {"key", "private"}:
            raise ValueError(f"a random state has the keys key and private, not {sorted(state)}")
        restored = SecureRandom(self.context, key=bytes.fromhex(str(state["key"])))
        restored.private = bool(state["private"])
        return restored

    def _counter(self, step: int, stream: int, block: int) -> int:
        step, stream = whole("step", step, 0), whole("stream", stream, 0)
        if step >= MOST_STEPS or stream >= MOST_STREAMS or block >= MOST_BLOCKS:
            raise ValueError(f"step {step}, stream {stream} or block {block} is beyond the counter")
        return step << 80 | stream << 32 | block

    def _cipher(self, step: int, stream: int, block: int) -> CipherContext:
        counter = self._counter(step, stream, block).to_bytes(16, "little")
        return Cipher(algorithms.ChaCha20(self._cipher_key, counter), mode=None).encryptor()


class SecureNoise:
    """Standard normal numbers, never the same twice: for a single release, without an address."""

    def __init__(self, *, seed: int | None = None) -> None:
        self._random = SecureRandom("one release", seed=seed)
        self._calls = 0

    @property
    def private(self) -> bool:
        return self._random.private

    def normal(self, count: int) -> np.ndarray:
        """(count,) float64."""
        self._calls += 1
        return self._random.normal(count, step=self._calls)


def public_grid(deviation: float) -> float:
    """The step of the grid to which anything with Gaussian noise of this deviation is rounded before it is released.

    A sum of floating point numbers shows in its last bits what was added: which values can be reached at all depends on
    the secret summand (Mironov 2012; Jin et al. 2022; Haney et al. 2022 show that more careful noise, such as the sum
    of four deviates, halved, is no cure). Rounded to a public grid far coarser than float64 (a power of two,
    at most 2⁻¹⁰ of the deviation) those bits are gone. That is post-processing, and adds 10⁻⁷ to the variance.
    """
    return 2.0 ** (math.floor(math.log2(deviation)) - 10)


def _key_of_seed(seed: int) -> bytes:
    return hashlib.sha256(f"dpformer seed {whole('seed', seed, 0)}".encode()).digest()
