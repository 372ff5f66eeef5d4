"""Secure random numbers with an address: a pure function of (key, context, step, stream).

AES-256 in counter mode under a key of the operating system: without the key, the numbers cannot be told from random
ones (then the guarantee is computational, as with every generator that is not a coin). The counter block of 128 bits is

    step (48 bits) | stream (32 bits) | block (48 bits)

so no two addresses share a block, and the state to keep is the key and the step. Everything else, what the numbers are
for, the configuration, the data, goes into `context`, from which the AES key is derived (HMAC-SHA256): the same key in
another context gives other numbers.
"""

import hashlib
import hmac
import math
import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from dpformer.privacy.arguments import whole

KEY_BYTES = 32
CHUNK = 2**14  # numbers made at a time: they stay in cache
MOST_STEPS, MOST_STREAMS = 2**48, 2**32


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
        self._cipher = algorithms.AES(hmac.digest(key, context.encode(), hashlib.sha256))

    @property
    def description(self) -> str:
        """One sentence for privacy statements."""
        if self.private:
            return "random numbers from AES-256-CTR under a key of the operating system"
        return "random numbers from a seed: NOT private, whoever knows the seed can undo the noise (for tests only)"

    def within(self, context: str) -> "SecureRandom":
        """The same secret, for other numbers: a narrower context. Lengths are part of it, so none can be mistaken."""
        narrower = SecureRandom(f"{len(self.context)}:{self.context}/{context}", key=self._key)
        narrower.private = self.private
        return narrower

    def words(self, count: int, *, step: int, stream: int = 0, start: int = 0) -> np.ndarray:
        """(count,) uint64, uniform; the numbers `start` and on of this address (`start` even: a block is two)."""
        return _next_words(self._stream(step, stream, start // 2), count)

    def normal(self, count: int, *, step: int, stream: int = 0) -> np.ndarray:
        """(count,) float64 standard normal numbers, by Box and Muller from 64-bit uniforms.

        z = √(−2 ln u)·(cos, sin)(2πv). All 64 bits of u count, so the tail reaches 9.4 deviations; for d coordinates
        and T steps the missing rest is below 10⁻¹⁹·√d·T of δ.
        """
        keystream = self._stream(step, stream)
        out = np.empty(count)
        for done in range(0, count, CHUNK):
            part = out[done : done + CHUNK]
            part[:] = _box_muller(_next_words(keystream, CHUNK))[: len(part)]
        return out

    def state_dict(self) -> dict[str, object]:
        """The secret: whoever has it can undo the noise. Plain types, for `torch.load(weights_only=True)`."""
        return {"key": self._key.hex(), "private": self.private}

    def with_state(self, state: dict[str, object]) -> "SecureRandom":
        """This context under the secret of `state`."""
        if set(state) != {"key", "private"}:
            raise ValueError(f"a random state has the keys key and private, not {sorted(state)}")
        restored = SecureRandom(self.context, key=bytes.fromhex(str(state["key"])))
        restored.private = bool(state["private"])
        return restored

    def _stream(self, step: int, stream: int, block: int = 0) -> CipherContext:
        step, stream = whole("step", step, 0), whole("stream", stream, 0)
        if step >= MOST_STEPS or stream >= MOST_STREAMS:
            raise ValueError(f"step {step} or stream {stream} is beyond the counter")
        nonce = (step << 80 | stream << 48 | block).to_bytes(16, "big")
        return Cipher(self._cipher, modes.CTR(nonce)).encryptor()


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


def _next_words(keystream: CipherContext, count: int) -> np.ndarray:
    return np.frombuffer(keystream.update(bytes(8 * count)), dtype="<u8")


def _box_muller(words: np.ndarray) -> np.ndarray:
    half = len(words) // 2
    radius = words[:half].astype(np.float64)
    radius += 1  # (0, 1] in units of 2⁻⁶⁴: the logarithm is finite
    radius *= 2.0**-64
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    angle = words[half:].astype(np.float64)
    angle *= 2 * math.pi * 2.0**-64
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


def _key_of_seed(seed: int) -> bytes:
    return hashlib.sha256(f"dpformer seed {whole('seed', seed, 0)}".encode()).digest()
