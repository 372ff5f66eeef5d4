"""Secure random numbers by address: a pure function of (key, context, step, stream).

ChaCha20 under a key from the operating system: without the key, the numbers are indistinguishable from random ones
(so the guarantee is computational, as with any pseudorandom generator). Its 128-bit counter is

    step (48 bits) | stream (48 bits) | block of 64 bytes (32 bits)

so no two addresses share a block, and the state to store is the key and the step. Everything else (the purpose of the
numbers, the configuration, the data) goes into `context`, from which the cipher key is derived (HMAC-SHA256): the same
key in another context gives other numbers. On the CPU the cipher is OpenSSL's; on another device the same keystream is
computed there (chacha.py), so numbers are never copied between devices.
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
from dpformer.noise.chacha import BLOCK_WORDS, initial_state, keystream
from dpformer.noise.gaussian import GROUP, Workspace, normal_of_words

KEY_BYTES = 32
CHUNK = 2**16  # numbers generated at a time by a CPU thread, which fit in the cache
PIECE = 2**22  # numbers generated at a time on another device
MOST_STEPS, MOST_STREAMS, MOST_BLOCKS = 2**48, 2**48, 2**32
MOST_NUMBERS = MOST_BLOCKS * BLOCK_WORDS  # numbers per stream
_ZEROS = bytes(8 * CHUNK)
_thread = local()


class SecureRandom:
    """Random numbers addressed by step and stream.

    Args:
        context: the purpose of the numbers and what they depend on; any text.
        key: 32 secret bytes; by default drawn from the operating system.
        seed: for tests only, instead of a key. Anyone who knows it can remove the noise, so `private` is False.
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
        return (
            "random numbers from a seed: NOT private, anyone who knows the seed can remove the noise (for tests only)"
        )

    @property
    def identity(self) -> str:
        """The same for the same secret and context, different otherwise; does not reveal the secret."""
        return hashlib.sha256(self.within("identity").words(4, step=0).tobytes()).hexdigest()

    def within(self, context: str) -> SecureRandom:
        """The same secret for other numbers: a narrower context. Lengths are included, so contexts are unambiguous."""
        narrower = SecureRandom(f"{len(self.context)}:{self.context}/{context}", key=self._key)
        narrower.private = self.private
        return narrower

    def words(self, count: int, *, step: int, stream: int = 0, start: int = 0) -> np.ndarray:
        """(count,) uint64, uniform; the words of this address from `start`."""
        block, skipped = divmod(whole("start", start, 0), BLOCK_WORDS)
        cipher = self._cipher(step, stream, block)
        return np.frombuffer(cipher.update(bytes(8 * (skipped + count))), dtype="<u8")[skipped:]

    def fill_words(self, out: memoryview, count: int, *, step: int, stream: int, group: int) -> None:
        """`count` words of this address, from a group of normal numbers, into bytes with space for 63 more."""
        cipher, zeros = self._cipher(step, stream, group * GROUP // BLOCK_WORDS), memoryview(_ZEROS)
        for done in range(0, count, CHUNK):
            cipher.update_into(zeros[: 8 * min(CHUNK, count - done)], out[8 * done :])

    def normal(self, count: int, *, step: int, stream: int = 0, start: int = 0) -> np.ndarray:
        """(count,) float64 standard normal numbers (gaussian.py); the numbers of this address from `start`."""
        out = torch.empty(count, dtype=torch.float64)
        self.fill_normal(out, step=step, stream=stream, start=start)
        return out.numpy()

    def fill_normal(self, out: Tensor, *, step: int, stream: int = 0, start: int = 0) -> None:
        """The same numbers into a tensor of float64, shape (count,), generated on its device."""
        if not len(out):
            return
        before = whole("start", start, 0) % GROUP
        groups = -(-(before + len(out)) // GROUP)  # groups that contain the numbers
        if before or groups * GROUP != len(out):
            whole_groups = torch.empty(groups * GROUP, dtype=torch.float64, device=out.device)
            self._fill_groups(whole_groups, step, stream, start // GROUP)
            out.copy_(whole_groups[before : before + len(out)])
        else:
            self._fill_groups(out, step, stream, start // GROUP)

    def _fill_groups(self, out: Tensor, step: int, stream: int, group: int) -> None:
        """Whole groups, starting with this one."""
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
        """Whole groups on the CPU, by one thread, in pieces that fit in the cache."""
        if not hasattr(_thread, "workspace"):
            _thread.workspace = Workspace(CHUNK)
        workspace: Workspace = _thread.workspace
        for part in out.split(CHUNK):
            self.fill_words(memoryview(workspace.words), len(part), step=step, stream=stream, group=group)
            workspace.normal(part)
            group += CHUNK // GROUP

    def state_dict(self) -> dict[str, object]:
        """The secret, which allows removing the noise. Plain types, for `torch.load(weights_only=True)`."""
        return {"key": self._key.hex(), "private": self.private}

    def with_state(self, state: dict[str, object]) -> SecureRandom:
        """This context under the secret of `state`."""
        if set(state) != {"key", "private"}:
            raise ValueError(f"a random state has the keys key and private, not {sorted(state)}")
        restored = SecureRandom(self.context, key=bytes.fromhex(str(state["key"])))
        restored.private = bool(state["private"])
        return restored

    def cipher_state(self, step: int, stream: int, block: int, blocks: int) -> list[int]:
        """The cipher's state at the first of these blocks of an address, for a kernel that computes them; secret."""
        return initial_state(self._cipher_key, self._counter(step, stream, block), blocks)

    def _counter(self, step: int, stream: int, block: int) -> int:
        step, stream = whole("step", step, 0), whole("stream", stream, 0)
        if step >= MOST_STEPS or stream >= MOST_STREAMS or block >= MOST_BLOCKS:
            raise ValueError(f"step {step}, stream {stream} or block {block} is beyond the counter")
        return step << 80 | stream << 32 | block

    def _cipher(self, step: int, stream: int, block: int) -> CipherContext:
        counter = self._counter(step, stream, block).to_bytes(16, "little")
        return Cipher(algorithms.ChaCha20(self._cipher_key, counter), mode=None).encryptor()


class SecureNoise:
    """Standard normal numbers that are never repeated: for a single release, without an address."""

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
    """The grid spacing to which anything with Gaussian noise of this standard deviation is rounded before release.

    The last bits of a floating point sum reveal what was added: which values are reachable at all depends on the secret
    summand (Mironov 2012; Jin et al. 2022; Haney et al. 2022 show that more careful noise, such as half the sum of four
    normal deviates, does not help). Rounding to a public grid far coarser than float64 (a power of two,
    at most 2⁻¹⁰ of the standard deviation) removes those bits. It is post-processing, and adds 10⁻⁷ to the variance.
    """
    return 2.0 ** (math.floor(math.log2(deviation)) - 10)


def _key_of_seed(seed: int) -> bytes:
    return hashlib.sha256(f"dpformer seed {whole('seed', seed, 0)}".encode()).digest()
